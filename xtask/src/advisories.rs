//! Licences, bans, sources and security advisories of the dependencies, by cargo-deny.

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::process::{say, shell};

/// Where cargo-deny clones the advisories from, unless `$HINDSIGHT_ADVISORY_DB` names a mirror.
const DATABASE: &str = "https://github.com/RustSec/advisory-db";

/// Checks the dependencies.
///
/// Advisories are checked when the advisory database can be fetched, or was fetched before; else one
/// line says so. The other checks require no network.
pub fn run() -> Result<()> {
    let shell = shell()?;
    if cmd!(shell, "cargo deny --version")
        .quiet()
        .ignore_stderr()
        .read()
        .is_err()
    {
        say("installing cargo-deny");
        cmd!(shell, "cargo install --quiet --locked cargo-deny")
            .quiet()
            .run()
            .context("cargo-deny is missing: cargo install --locked cargo-deny")?;
    }
    cmd!(
        shell,
        "cargo deny --log-level error check bans licenses sources"
    )
    .run()?;
    fetch_database(&shell);
    check_advisories(&shell)
}

/// Fetches the advisory database, if it can be reached.
fn fetch_database(shell: &Shell) {
    let mut fetch = cmd!(shell, "cargo deny fetch db")
        .quiet()
        .ignore_status()
        .ignore_stderr();
    if let Ok(mirror) = std::env::var("HINDSIGHT_ADVISORY_DB") {
        fetch = fetch
            .env("GIT_CONFIG_COUNT", "1")
            .env("GIT_CONFIG_KEY_0", format!("url.{mirror}.insteadOf"))
            .env("GIT_CONFIG_VALUE_0", DATABASE);
    }
    // Whether it worked shows when the advisories are checked.
    fetch.run().ok();
}

/// Checks the advisories with the database that there is.
fn check_advisories(shell: &Shell) -> Result<()> {
    let check = cmd!(
        shell,
        "cargo deny --offline --log-level warn check advisories"
    );
    let output = check.quiet().ignore_status().output()?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    // The summary is missing when there is no database.
    if text.contains("advisories ok") {
        println!("{}", text.trim());
    } else if text.contains("advisories FAILED") {
        println!("{}", text.trim());
        bail!("there are advisories of the dependencies");
    } else {
        println!(
            "advisories: not checked, because {DATABASE} cannot be fetched here; \
             HINDSIGHT_ADVISORY_DB=URL names a git mirror of it"
        );
    }
    Ok(())
}
