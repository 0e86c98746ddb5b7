//! The Python package `hindsight`: built, tested, and type-checked.

use anyhow::Result;
use xshell::cmd;

use crate::process::{root, shell};

/// What builds the package.
const MATURIN: &str = "maturin>=1.9,<2";

/// Builds the package into an environment of its own, runs its tests, and compares its types with the
/// module, the tests and the examples.
pub fn run() -> Result<()> {
    let shell = shell()?;
    let environment = root().join("target/ci/python-package");
    let bin = environment.join("bin");
    let (python, maturin) = (bin.join("python"), bin.join("maturin"));
    if !maturin.exists() {
        cmd!(shell, "python3 -m venv {environment}").quiet().run()?;
        cmd!(
            shell,
            "{python} -m pip install --quiet --disable-pip-version-check {MATURIN}"
        )
        .quiet()
        .run()?;
    }
    shell.change_dir(root().join("python"));
    // The program's payloads are no part of the package.
    cmd!(shell, "{maturin} develop --quiet --extras test")
        .env("VIRTUAL_ENV", &environment)
        .env("HINDSIGHT_WITHOUT_PAYLOADS", "1")
        .run()?;
    cmd!(shell, "{python} -B -m pytest -q -p no:cacheprovider").run()?;
    cmd!(shell, "{python} -m mypy.stubtest hindsight").run()?;
    cmd!(
        shell,
        "{python} -m mypy --strict --cache-dir ../target/ci/mypy tests ../examples/python"
    )
    .run()?;
    Ok(())
}
