//! Compares the counts of a run with those of an earlier one.

use std::fmt;

use anyhow::{Context, bail};

use super::figures::{Figures, grouped};

/// How much a count may increase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum IncreaseLimit {
    Percent(f64),
    Count(u64),
}

impl IncreaseLimit {
    /// Parses `0.5%` or a number.
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent
                .trim()
                .parse()
                .ok()
                .filter(|p: &f64| p.is_finite() && *p >= 0.0)
                .with_context(|| format!("--max-increase {text}: not a percentage"))?;
            return Ok(Self::Percent(percent));
        }
        let count = text.parse();
        let count = count
            .with_context(|| format!("--max-increase {text}: neither a count nor a percentage"))?;
        Ok(Self::Count(count))
    }

    /// Whether `now` is too far above `before`.
    fn is_exceeded(self, before: u64, now: u64) -> bool {
        let increase = now.saturating_sub(before);
        match self {
            Self::Percent(percent) => increase as f64 > before as f64 * percent / 100.0,
            Self::Count(count) => increase > count,
        }
    }
}

/// One compared count.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Comparison {
    /// The region and the count.
    pub(super) name: String,
    pub(super) before: u64,
    pub(super) now: u64,
    pub(super) exceeded: bool,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            before,
            now,
            exceeded,
        } = self;
        let sign = if now < before { '-' } else { '+' };
        let difference = grouped(now.abs_diff(*before));
        let verdict = if *exceeded { "FAIL" } else { "ok" };
        write!(
            f,
            "{verdict}: {name} {} -> {}, {sign}{difference}",
            grouped(*before),
            grouped(*now)
        )?;
        if *before != 0 {
            let percent = 100.0 * now.abs_diff(*before) as f64 / *before as f64;
            write!(f, " ({sign}{percent:.3} %)")?;
        }
        Ok(())
    }
}

/// Compares the counts that are named, in the whole run and in each region of the baseline.
///
/// # Errors
///
/// When the runs have different counts, regions or processors.
pub(super) fn compare(
    baseline: &Figures,
    now: &Figures,
    counts: &[String],
    limit: IncreaseLimit,
) -> anyhow::Result<Vec<Comparison>> {
    if (&baseline.cpu, baseline.seed) != (&now.cpu, now.seed) {
        bail!(
            "the baseline is of another processor or seed: {} {:?}",
            baseline.cpu,
            baseline.seed
        );
    }
    let mut comparisons = Vec::new();
    let mut add = |part: &str, name: &String, before: Option<&u64>, now: Option<&u64>| {
        let (Some(&before), Some(&now)) = (before, now) else {
            bail!("the baseline or this run has no count {part}{name}");
        };
        comparisons.push(Comparison {
            name: format!("{part}{name}"),
            before,
            now,
            exceeded: limit.is_exceeded(before, now),
        });
        Ok(())
    };
    for name in counts {
        add("", name, baseline.counts.get(name), now.counts.get(name))?;
        for (region, before) in &baseline.regions {
            let Some(own) = now.regions.get(region) else {
                bail!("this run has no region {region}, which the baseline has");
            };
            add(
                &format!("{region}: "),
                name,
                before.counts.get(name),
                own.counts.get(name),
            )?;
        }
    }
    Ok(comparisons)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(instructions: u64) -> Figures {
        Figures {
            counts: [("instructions".to_owned(), instructions)].into(),
            ..Figures::default()
        }
    }

    #[test]
    fn increase_above_the_limit_fails() {
        let names = ["instructions".to_owned()];
        let failed = |limit: &str, now| {
            let limit = IncreaseLimit::parse(limit).unwrap();
            compare(&figures(100_000), &figures(now), &names, limit).unwrap()[0].exceeded
        };
        assert!(!failed("0.1%", 100_100));
        assert!(failed("0.1%", 100_101));
        assert!(!failed("5", 100_005) && failed("5", 100_006));
        assert!(!failed("0%", 90_000));
        assert!(IncreaseLimit::parse("-1%").is_err() && IncreaseLimit::parse("much").is_err());
    }

    #[test]
    fn comparison_reads_as_a_verdict() {
        let names = ["instructions".to_owned()];
        let limit = IncreaseLimit::Percent(0.0);
        let rows = compare(&figures(2000), &figures(2001), &names, limit).unwrap();
        assert_eq!(
            rows[0].to_string(),
            "FAIL: instructions 2 000 -> 2 001, +1 (+0.050 %)"
        );
        let missing = ["loads".to_owned()];
        assert!(compare(&figures(1), &figures(1), &missing, limit).is_err());
    }
}
