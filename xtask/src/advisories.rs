//! Licences, bans, sources and security advisories of the dependencies, by cargo-deny.

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::process::{say, shell};

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
    if has_database(&shell) {
        cmd!(
            shell,
            "cargo deny --log-level warn check advisories --disable-fetch"
        )
        .run()?;
    } else {
        println!(
            "advisories: not checked, because the advisory database cannot be fetched here; with \
             access to it: cargo deny fetch db && ci/test deny"
        );
    }
    Ok(())
}

/// Fetches the advisory database; returns whether there is one, this or an older one.
fn has_database(shell: &Shell) -> bool {
    if cmd!(shell, "cargo deny fetch db")
        .quiet()
        .ignore_stderr()
        .run()
        .is_ok()
    {
        return true;
    }
    let check = cmd!(
        shell,
        "cargo deny --log-level off check --disable-fetch advisories"
    );
    let output = check.quiet().ignore_status().output();
    // Without a database the check prints no summary of advisories.
    output.is_ok_and(|output| {
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text).contains("advisories ")
    })
}
