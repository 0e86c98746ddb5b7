//! Joins the counts of `hindsight stat`.

use std::collections::BTreeMap;

use anyhow::{Context, bail};

use super::merged::MergedReport;
use crate::cli::stat::Figures;

/// What a deterministic run depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RunKey {
    image: String,
    cpu: String,
    seed: u64,
    inputs: String,
}

/// Adds up the counts of all runs. A deterministic run that was made twice counts once.
pub(super) fn merge(files: &[(String, String)]) -> anyhow::Result<MergedReport> {
    let mut total: Option<Figures> = None;
    let mut runs = BTreeMap::<RunKey, &String>::new();
    let mut figures: BTreeMap<RunKey, Figures> = BTreeMap::new();
    let mut others = Vec::new();
    let mut repeated = 0;
    for (name, text) in files {
        let run: Figures = serde_json::from_str(text)
            .with_context(|| format!("{name} was not written by hindsight stat"))?;
        let Some(seed) = run.seed else {
            others.push(run);
            continue;
        };
        let key = RunKey {
            image: run.image.clone(),
            cpu: run.cpu.clone(),
            seed,
            inputs: run.inputs.clone(),
        };
        match figures.get(&key) {
            Some(old) if *old == run => repeated += 1,
            Some(_) => bail!("{name} and {} are of the same run but differ", runs[&key]),
            None => {
                runs.insert(key.clone(), name);
                figures.insert(key, run);
            }
        }
    }
    for run in figures.into_values().chain(others) {
        match &mut total {
            Some(total) => total.add(run)?,
            None => total = Some(run),
        }
    }
    let total = total.context("there are no counts")?;
    let mut remarks = Vec::new();
    if repeated != 0 {
        remarks.push(format!("{repeated} runs were made before and count once"));
    }
    Ok(MergedReport {
        text: serde_json::to_string_pretty(&total)? + "\n",
        remarks,
        passed: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(seed: &str, instructions: u64) -> (String, String) {
        let text = format!(
            "{{\"version\": 1, \"image\": \"i\", \"cpu\": \"c\", \"seed\": {seed}, \
             \"counts\": {{\"instructions\": {instructions}}}, \
             \"functions\": [{{\"name\": \"f\", \"calls\": 1, \"instructions\": 5, \"inclusive\": 6}}]}}"
        );
        (format!("{seed}.json"), text)
    }

    #[test]
    fn runs_are_added_and_a_repeated_one_counts_once() {
        let merged = merge(&[file("1", 10), file("2", 20), file("1", 10)]).unwrap();
        let total: Figures = serde_json::from_str(&merged.text).unwrap();
        assert_eq!(total.counts["instructions"], 30);
        assert_eq!((total.functions.len(), total.functions[0].calls), (1, 2));
        assert_eq!(total.seed, None);
        assert_eq!(merged.remarks, ["1 runs were made before and count once"]);
        let live = merge(&[file("null", 10), file("null", 10)]).unwrap();
        let live: Figures = serde_json::from_str(&live.text).unwrap();
        assert_eq!(live.counts["instructions"], 20);
    }

    #[test]
    fn runs_with_other_inputs_are_other_runs() {
        let with = |inputs: &str, instructions| {
            let (name, text) = file("1", instructions);
            let inputs = format!("{{\"inputs\": \"{inputs}\",");
            (name, text.replacen('{', &inputs, 1))
        };
        let merged = merge(&[with("a", 10), with("b", 20), with("a", 10)]).unwrap();
        let total: Figures = serde_json::from_str(&merged.text).unwrap();
        assert_eq!(total.counts["instructions"], 30);
        assert!(total.inputs.is_empty());
    }

    #[test]
    fn runs_with_the_same_seed_must_be_equal() {
        let error = merge(&[file("1", 10), file("1", 11)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "1.json and 1.json are of the same run but differ"
        );
        assert!(merge(&[("x".to_owned(), "{\"counts\": 3}".to_owned())]).is_err());
    }
}
