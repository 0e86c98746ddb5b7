//! Makes jobs of images: every case at every level that the user selects.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hindsight_cpu::facility::Facilities;
use thiserror::Error;

use crate::harness::case::{PayloadCase, TIMEOUT_DEFAULT};
use crate::harness::image::TestImage;
use crate::harness::needs::{Capabilities, NeedCache};

/// One run of one case at one level.
#[derive(Clone, Debug)]
pub struct TestJob {
    /// The image.
    pub image: Arc<TestImage>,
    /// The case; `None` if the image as a whole is the case.
    pub case: Option<PayloadCase>,
    /// Privilege level at which the case runs.
    pub cpl: u8,
    /// With `--repeat`: the number of this run, and of all runs.
    pub repeat: Option<(u32, u32)>,
    /// Why the job is skipped on this host.
    pub skip: Option<String>,
}

impl TestJob {
    /// `PAYLOAD/CASE`, or the image's name if it is one case.
    pub fn name(&self) -> String {
        match &self.case {
            None => self.image.name.clone(),
            Some(case) if is_below(&case.name, &self.image.name) => case.name.clone(),
            Some(case) => format!("{}/{}", self.image.name, case.name),
        }
    }

    /// The name with the level, for reports: `exceptions/int3 cpl=0`.
    pub fn id(&self) -> String {
        let mut id = self.name();
        if self.case.is_some() {
            id.push_str(&format!(" cpl={}", self.cpl));
        }
        if let Some((number, count)) = self.repeat {
            id.push_str(&format!(" run {number}/{count}"));
        }
        id
    }

    /// Rules that the case asserts.
    pub fn rules(&self) -> &[String] {
        self.case.as_ref().map_or(&[], |case| &case.rules)
    }

    /// Number of vCPUs of the case.
    pub fn vcpus(&self) -> u32 {
        self.case.as_ref().map_or(1, |case| case.vcpus)
    }

    /// The case's own time limit.
    pub fn timeout(&self) -> Duration {
        self.case
            .as_ref()
            .map_or(TIMEOUT_DEFAULT, |case| case.timeout)
    }
}

fn is_below(name: &str, payload: &str) -> bool {
    name.strip_prefix(payload)
        .is_some_and(|rest| rest.starts_with('/'))
}

/// Every case of the images at every level, in the order of the images and their records.
pub fn jobs(images: &[Arc<TestImage>]) -> Vec<TestJob> {
    let mut jobs = Vec::new();
    for image in images {
        let job = |case: Option<&PayloadCase>, cpl| TestJob {
            image: Arc::clone(image),
            case: case.cloned(),
            cpl,
            repeat: None,
            skip: None,
        };
        match &image.cases {
            None => jobs.push(job(None, 0)),
            Some(cases) => {
                let runs = cases
                    .iter()
                    .flat_map(|case| case.cpls.iter().map(move |l| (case, *l)));
                jobs.extend(runs.map(|(case, cpl)| job(Some(case), cpl)));
            }
        }
    }
    jobs
}

/// A pattern for names: with `*` or `?`, a glob for the whole name; otherwise a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(pub String);

impl Pattern {
    /// Whether the pattern has wildcards.
    fn is_glob(&self) -> bool {
        self.0.contains(['*', '?'])
    }

    /// Whether the pattern matches `job`: its name, or its name with the level.
    pub fn matches(&self, job: &TestJob) -> bool {
        if self.is_glob() {
            glob(self.0.as_bytes(), job.name().as_bytes())
                || glob(self.0.as_bytes(), job.id().as_bytes())
        } else {
            job.id().contains(&self.0)
        }
    }

    /// Whether the pattern, as a glob, matches one of the rules of `job`.
    pub fn matches_rules(&self, job: &TestJob) -> bool {
        job.rules()
            .iter()
            .any(|rule| glob(self.0.as_bytes(), rule.as_bytes()))
    }
}

/// Matches `*` (any bytes) and `?` (one byte). The time for each byte is linear in the pattern.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut retry = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, t));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((after, from)) = retry else {
                    return false;
                };
                retry = Some((after, from + 1));
                p = after;
                t = from + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// Part `index` of `count` of the jobs, counted from 1: `--shard 1/4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

/// Why a shard is not known.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ShardError {
    /// It is not `i/n` with 1 <= i <= n.
    #[error("a shard is i/n with 1 <= i <= n, such as 1/4, or auto")]
    Form,
    /// No variable has the number of this task.
    #[error("auto needs SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or PARALLEL_SEQ")]
    NoTask,
    /// Variables of several engines have a number, such as those of one that runs another.
    #[error("auto finds both {0} and {1}: unset one of them, or use i/n")]
    SeveralTasks(&'static str, &'static str),
    /// No variable has the number of tasks.
    #[error("only Slurm has the number of tasks in a variable: use auto/N")]
    NoCount,
    /// The numbers of a Slurm array are not successive.
    #[error("the numbers of the array must be successive, without a step")]
    Step,
}

/// A variable with the number of a task among others, and the number of the first task.
const TASKS: [(&str, usize); 3] = [
    ("SLURM_ARRAY_TASK_ID", 0),
    ("JOB_COMPLETION_INDEX", 0),
    // GNU parallel counts from 1.
    ("PARALLEL_SEQ", 1),
];

impl Shard {
    /// The share of this task, by the variables of the engine that runs it. `count` is the number of
    /// tasks; Slurm tells it to its tasks itself.
    ///
    /// # Errors
    ///
    /// When no engine has numbered this task, or the number of tasks is not known.
    fn of_task(
        count: Option<usize>,
        variable: impl Fn(&str) -> Option<usize>,
    ) -> Result<Self, ShardError> {
        let mut tasks = TASKS.iter().filter_map(|&(name, first)| {
            let number = variable(name)?;
            Some((name, number, first))
        });
        let (name, number, mut first) = tasks.next().ok_or(ShardError::NoTask)?;
        if let Some((other, ..)) = tasks.next() {
            return Err(ShardError::SeveralTasks(name, other));
        }
        let mut count = count;
        if name == "SLURM_ARRAY_TASK_ID" {
            first = variable("SLURM_ARRAY_TASK_MIN").unwrap_or(0);
            let step = variable("SLURM_ARRAY_TASK_STEP").unwrap_or(1);
            if step != 1 {
                return Err(ShardError::Step);
            }
            // A task that is repeated alone is an array of one: its number of shards is that of before.
            count = count.or_else(|| variable("SLURM_ARRAY_TASK_COUNT"));
            if count != variable("SLURM_ARRAY_TASK_COUNT") {
                first = 0;
            }
        }
        let count = count.ok_or(ShardError::NoCount)?;
        let index = number.checked_sub(first).ok_or(ShardError::Form)? + 1;
        if index <= count {
            Ok(Self { index, count })
        } else {
            Err(ShardError::Form)
        }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let variable = |name: &str| std::env::var(name).ok()?.parse().ok();
        let number = |text: &str| text.parse().map_err(|_| ShardError::Form);
        if text == "auto" {
            return Self::of_task(None, variable);
        }
        let (index, count) = text.split_once('/').ok_or(ShardError::Form)?;
        let count = number(count)?;
        if index == "auto" {
            return Self::of_task(Some(count), variable);
        }
        let index = number(index)?;
        if (1..=count).contains(&index) {
            Ok(Self { index, count })
        } else {
            Err(ShardError::Form)
        }
    }
}

impl Shard {
    /// Keeps the jobs of this shard: every n-th, so that neighbouring jobs of similar cost are
    /// divided.
    pub fn keep(self, jobs: Vec<TestJob>) -> Vec<TestJob> {
        jobs.into_iter()
            .enumerate()
            .filter(|(at, _)| at % self.count == self.index - 1)
            .map(|(_, job)| job)
            .collect()
    }
}

/// Keeps the jobs that one of `filters` and one of `rules` match. An empty list matches all.
pub fn filter(jobs: Vec<TestJob>, filters: &[Pattern], rules: &[Pattern]) -> Vec<TestJob> {
    jobs.into_iter()
        .filter(|job| filters.is_empty() || filters.iter().any(|f| f.matches(job)))
        .filter(|job| rules.is_empty() || rules.iter().any(|r| r.matches_rules(job)))
        .collect()
}

/// Repeats the whole list `count` times.
pub fn repeat(jobs: Vec<TestJob>, count: u32) -> Vec<TestJob> {
    if count == 1 {
        return jobs;
    }
    let run = |number| {
        jobs.iter().map(move |job| TestJob {
            repeat: Some((number, count)),
            ..job.clone()
        })
    };
    (1..=count).flat_map(run).collect()
}

/// A case has a need that no probe measures.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("case {case}: unknown need `{need}`")]
pub struct UnknownNeed {
    /// Name of the case.
    pub case: String,
    /// The need.
    pub need: String,
}

/// Checks that every need of every case is known.
///
/// # Errors
///
/// Returns the first unknown need.
pub fn check_needs(jobs: &[TestJob], capabilities: &dyn Capabilities) -> Result<(), UnknownNeed> {
    for job in jobs {
        let mut needs = job.case.iter().flat_map(|case| case.needs_at(job.cpl));
        if let Some(need) = needs.find(|need| !capabilities.is_known(need)) {
            return Err(UnknownNeed {
                case: job.name(),
                need: need.to_owned(),
            });
        }
    }
    Ok(())
}

/// Marks the jobs whose needs this host does not meet as skipped.
pub fn mark_unmet(jobs: &mut [TestJob], capabilities: &dyn Capabilities) {
    let mut cache = NeedCache::new(capabilities);
    for job in jobs {
        if let (None, Some(case)) = (&job.skip, &job.case) {
            job.skip = cache.first_unmet(case.needs_at(job.cpl));
        }
    }
}

/// Marks the jobs whose processor profile or clock needs the interpreter as skipped.
pub fn mark_profiles(jobs: &mut [TestJob], available: Facilities) {
    for job in jobs {
        if let (None, Some(cpu)) = (&job.skip, job.case.as_ref().and_then(|case| case.cpu)) {
            job.skip = cpu.facilities(available).err().map(|e| e.to_string());
        }
        let clock = job.case.as_ref().is_some_and(|case| case.virtual_clock);
        if job.skip.is_none() && clock {
            job.skip = Some("a virtual clock needs the interpreter: --engine interp".to_owned());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::harness::image::tests::elf_with_cases;
    use crate::harness::needs::Unmeasured;

    pub(crate) fn jobs_of(name: &str, records: &str) -> Vec<TestJob> {
        let image = TestImage::builtin(name, &elf_with_cases(records.as_bytes())).unwrap();
        jobs(&[Arc::new(image)])
    }

    #[test]
    fn job_that_needs_the_interpreter_is_skipped_under_kvm() {
        let records = "case a cpu=pmu=8\ncase b cpu=-x2apic\ncase c\ncase d clock=virtual\n";
        let mut jobs = jobs_of("p", records);
        mark_profiles(&mut jobs, Facilities::KVM);
        let skipped: Vec<_> = jobs.iter().map(|job| job.skip.is_some()).collect();
        assert_eq!(skipped, [true, false, false, true]);
    }

    fn ids(jobs: &[TestJob]) -> Vec<String> {
        jobs.iter().map(TestJob::id).collect()
    }

    const RECORDS: &str = "case int3 cpl=0,3 rules=EXC-01 needs=exceptions needs_cpl0=int3-cpl0\n\
        case exc/ud cpl=3 rules=EXC-02,DBG-1\ncase zz\n";

    #[test]
    fn every_case_at_every_level_becomes_a_job_in_order() {
        let jobs = jobs_of("exc", RECORDS);
        assert_eq!(
            ids(&jobs),
            [
                "exc/int3 cpl=0",
                "exc/int3 cpl=3",
                "exc/ud cpl=3",
                "exc/zz cpl=0"
            ]
        );
    }

    #[test]
    fn image_without_cases_is_one_job() {
        let image = TestImage::builtin("flat.bin", b"rubbish").unwrap();
        assert_eq!(ids(&jobs(&[Arc::new(image)])), ["flat.bin"]);
    }

    #[test]
    fn filters_match_parts_of_names_globs_and_rules() {
        let rows: [(&[&str], &[&str], usize); 9] = [
            (&[], &[], 4),
            (&["int3"], &[], 2),
            (&["int3", "zz"], &[], 3),
            (&["cpl=3"], &[], 2),
            (&["exc/*t3"], &[], 2),
            (&["*cpl=0"], &[], 2),
            (&["int*"], &[], 0),
            (&[], &["EXC-01"], 2),
            (&["cpl=3"], &["EXC-*"], 2),
        ];
        for (filters, rules, count) in rows {
            let pattern = |p: &&str| Pattern((*p).to_owned());
            let filters: Vec<_> = filters.iter().map(pattern).collect();
            let rules: Vec<_> = rules.iter().map(pattern).collect();
            let selected = filter(jobs_of("exc", RECORDS), &filters, &rules);
            assert_eq!(selected.len(), count, "row {filters:?} {rules:?}");
        }
    }

    #[test]
    fn glob_with_many_stars_does_not_backtrack_exponentially() {
        assert!(glob(b"a*b?c*", b"aXXbbXcYY"));
        assert!(!glob(b"a*b", b"ab "));
        assert!(glob(b"**", b""));
        let text = vec![b'a'; 10_000];
        assert!(!glob(b"*a*a*a*a*a*a*a*a*b", &text));
    }

    #[test]
    fn shards_are_disjoint_and_complete() {
        let mut all: Vec<String> = (1..=3)
            .flat_map(|i| ids(&Shard { index: i, count: 3 }.keep(jobs_of("exc", RECORDS))))
            .collect();
        all.sort();
        let mut expected = ids(&jobs_of("exc", RECORDS));
        expected.sort();
        assert_eq!(all, expected);
    }

    #[test]
    fn malformed_shard_is_refused() {
        assert_eq!("2/3".parse(), Ok(Shard { index: 2, count: 3 }));
        for bad in ["", "1", "0/3", "4/3", "1/0", "-1/2", "a/b", "1/2/3"] {
            assert_eq!(bad.parse::<Shard>(), Err(ShardError::Form), "row {bad}");
        }
    }

    #[test]
    fn shard_of_a_task_follows_the_variables_of_its_engine() {
        let of = |count: Option<usize>, set: &[(&str, usize)]| {
            let find = |name: &str| set.iter().find(|(own, _)| *own == name).map(|(_, n)| *n);
            Shard::of_task(count, find).map(|shard| shard.to_string())
        };
        let ok = |text: &str| Ok(text.to_owned());
        let slurm = [
            ("SLURM_ARRAY_TASK_ID", 12),
            ("SLURM_ARRAY_TASK_MIN", 10),
            ("SLURM_ARRAY_TASK_COUNT", 8),
        ];
        assert_eq!(of(None, &slurm), ok("3/8"));
        assert_eq!(of(Some(8), &slurm), ok("3/8"));
        let repeated = [
            ("SLURM_ARRAY_TASK_ID", 5),
            ("SLURM_ARRAY_TASK_MIN", 5),
            ("SLURM_ARRAY_TASK_COUNT", 1),
        ];
        assert_eq!(of(Some(8), &repeated), ok("6/8"));
        assert_eq!(of(Some(4), &[("JOB_COMPLETION_INDEX", 0)]), ok("1/4"));
        assert_eq!(of(Some(4), &[("PARALLEL_SEQ", 4)]), ok("4/4"));
        assert_eq!(of(Some(4), &[("PARALLEL_SEQ", 5)]), Err(ShardError::Form));
        assert_eq!(of(None, &[("PARALLEL_SEQ", 1)]), Err(ShardError::NoCount));
        assert_eq!(of(Some(4), &[]), Err(ShardError::NoTask));
        let both = [("SLURM_ARRAY_TASK_ID", 1), ("PARALLEL_SEQ", 1)];
        let error = ShardError::SeveralTasks("SLURM_ARRAY_TASK_ID", "PARALLEL_SEQ");
        assert_eq!(of(Some(4), &both), Err(error));
        let step = [("SLURM_ARRAY_TASK_ID", 2), ("SLURM_ARRAY_TASK_STEP", 2)];
        assert_eq!(of(Some(4), &step), Err(ShardError::Step));
    }

    #[test]
    fn repeated_jobs_have_distinct_ids() {
        let jobs = repeat(jobs_of("exc", "case a\ncase b\n"), 2);
        assert_eq!(
            ids(&jobs),
            [
                "exc/a cpl=0 run 1/2",
                "exc/b cpl=0 run 1/2",
                "exc/a cpl=0 run 2/2",
                "exc/b cpl=0 run 2/2"
            ]
        );
    }

    struct NoInt3;

    impl Capabilities for NoInt3 {
        fn unmet(&self, need: &str) -> Option<String> {
            (need == "int3-cpl0").then(|| "internal error".to_owned())
        }
    }

    #[test]
    fn job_with_an_unmet_need_is_skipped_at_that_level_only() {
        let mut jobs = jobs_of("exc", RECORDS);
        mark_unmet(&mut jobs, &NoInt3);
        let reason = "this KVM: int3-cpl0: internal error";
        assert_eq!(jobs[0].skip.as_deref(), Some(reason));
        assert_eq!(jobs[1].skip, None);
    }

    #[test]
    fn unknown_need_is_refused() {
        let jobs = jobs_of("exc", "case a needs=nmi,magic\n");
        let error = check_needs(&jobs, &Unmeasured).unwrap_err();
        assert_eq!(error.to_string(), "case exc/a: unknown need `magic`");
    }
}
