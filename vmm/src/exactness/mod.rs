//! Measures which groups of facilities this host's KVM executes exactly.
//!
//! The measurement runs built-in payloads. The cases of a [`FacilityGroup`] run in child processes
//! of this program, each with a time limit: a case that hangs or crashes affects only its group's
//! verdict. Verdicts are kept on disk for one KVM (`identity`) and one build of this program.
//!
//! A group counts as exact only when all of its cases passed. A first start measures a short set
//! ([`Scope::Short`]), which can only show that a group is not exact; `hindsight doctor` measures
//! all.

mod groups;
mod identity;
mod measure;
mod store;

use std::collections::BTreeMap;

use anyhow::Result;

use measure::Measurement;
pub use measure::{MeasureMode, Scope};
use store::VerdictStore;

use crate::harness::verdict::CaseResult;
use crate::kvm::exactness::{FacilityGroup, GroupAction, GroupVerdict};
use crate::kvm::host_support::HostKvm;
use crate::probe::host::measure_kvm;

/// The verdicts on all groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdicts(pub BTreeMap<FacilityGroup, GroupVerdict>);

impl Verdicts {
    /// What `--engine auto` does because of the verdict on `group`.
    pub fn action(&self, group: FacilityGroup) -> GroupAction {
        let verdict = self.0.get(&group).cloned().unwrap_or_default();
        verdict.action(group.visibility())
    }

    /// The groups for which a machine must start in the interpreter, with the reasons.
    ///
    /// Groups with a failed case come first.
    pub fn deviations(&self) -> Vec<(FacilityGroup, String)> {
        let mut deviations: Vec<_> = FacilityGroup::ALL
            .into_iter()
            .filter_map(|group| match self.action(group) {
                GroupAction::Interpret(reason) => Some((group, reason)),
                GroupAction::Stay | GroupAction::MoveWhenArmed => None,
            })
            .collect();
        let failed = |group: FacilityGroup| {
            let verdict = self.0.get(&group);
            verdict.is_some_and(|verdict| verdict.deviates(group.visibility()))
        };
        deviations.sort_by_key(|(group, _)| !failed(*group));
        deviations
    }
}

/// Whether `--engine auto` uses verdicts on this host.
///
/// It does if KVM can run guests here, and executes ring 0 natively.
pub fn applies_to_host() -> bool {
    matches!(measure_kvm(), HostKvm::Usable { .. })
}

/// Returns the verdicts on this host's KVM.
///
/// If none are saved, measures the short set and saves its verdicts.
pub fn verdicts_for_start() -> Verdicts {
    let Some(store) = VerdictStore::of_this_kvm() else {
        return measure_short();
    };
    let saved = store.load();
    if !saved.0.is_empty() {
        return saved;
    }
    let verdicts = measure_short();
    store.save_or_log(&verdicts);
    verdicts
}

/// Measures every group and saves the verdicts for later starts. `on_case` is called with the group
/// and the case for each case that has run, `on_group` with each verdict.
///
/// # Errors
///
/// This program's file cannot be found, the host cannot create memory files, or `on_group` fails.
pub fn measure_all(
    scope: Scope,
    on_case: &mut dyn FnMut(FacilityGroup, &CaseResult),
    on_group: &mut dyn FnMut(FacilityGroup, &GroupVerdict) -> Result<()>,
) -> Result<()> {
    let measurement = Measurement::new(scope)?;
    let mut verdicts = Verdicts::default();
    for group in FacilityGroup::ALL {
        let verdict = measurement.measure(group, &mut |result| on_case(group, result));
        on_group(group, &verdict)?;
        verdicts.0.insert(group, verdict);
    }
    if let Some(store) = VerdictStore::of_this_kvm() {
        store.save_or_log(&verdicts);
    }
    Ok(())
}

fn measure_short() -> Verdicts {
    let Ok(measurement) = Measurement::new(Scope::Short) else {
        return Verdicts::default();
    };
    let mut verdicts = Verdicts::default();
    for group in FacilityGroup::ALL {
        let verdict = measurement.measure(group, &mut |_| {});
        let deviates = verdict.deviates(group.visibility());
        verdicts.0.insert(group, verdict);
        if deviates {
            break;
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::exactness::Exactness;

    fn verdict(alone: Exactness, moving: Exactness) -> GroupVerdict {
        GroupVerdict { alone, moving }
    }

    #[test]
    fn unmeasured_kvm_deviates_in_every_group() {
        assert_eq!(
            Verdicts::default().deviations().len(),
            FacilityGroup::ALL.len()
        );
    }

    #[test]
    fn kvm_that_is_exact_alone_or_by_moving_has_no_deviations() {
        let exact = || verdict(Exactness::Exact, Exactness::Exact);
        let all = FacilityGroup::ALL.map(|group| (group, exact()));
        let mut verdicts = Verdicts(BTreeMap::from(all));
        assert_eq!(verdicts.deviations(), []);
        let moves = verdict(Exactness::Inexact("x".to_owned()), Exactness::Exact);
        verdicts.0.insert(FacilityGroup::SingleStep, moves.clone());
        assert_eq!(verdicts.deviations(), []);
        verdicts.0.insert(FacilityGroup::Time, moves);
        let expected = vec![(FacilityGroup::Time, "x".to_owned())];
        assert_eq!(verdicts.deviations(), expected);
    }
}
