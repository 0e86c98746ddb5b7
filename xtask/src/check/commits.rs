//! The subjects of new commits.

use anyhow::Result;
use xshell::cmd;

use crate::process::shell;

const SUBJECT: usize = 72;

/// Warns of commits since the upstream branch whose subject is longer than 72 characters.
pub fn run() -> Result<()> {
    let shell = shell()?;
    let bases = ["@{upstream}", "origin/main", "main"];
    let base = bases.iter().find_map(|name| {
        cmd!(shell, "git merge-base HEAD {name}")
            .quiet()
            .ignore_stderr()
            .read()
            .ok()
    });
    let Some(base) = base else {
        println!("commits: not checked, because there is no upstream branch");
        return Ok(());
    };
    let log = cmd!(shell, "git log --no-merges --format=%h%x09%s {base}..HEAD")
        .quiet()
        .read()?;
    let long = log.lines().filter(|line| {
        line.split_once('\t')
            .is_some_and(|(_, subject)| subject.chars().count() > SUBJECT)
    });
    for line in long {
        println!(
            "warning: subject of more than {SUBJECT} characters: {}",
            line.replace('\t', " ")
        );
    }
    println!(
        "commits: {} since {}",
        log.lines().count(),
        &base[..base.len().min(12)]
    );
    Ok(())
}
