//! Answers of a live page's API: the runs that it lists, and the parts of a report that the view shows.

use std::collections::BTreeMap;
use std::time::Instant;

use rollflow::observe::StageShares;
use serde::Deserialize;

use super::curve::Curve;
use super::page::PageError;
use super::view::{RunView, ShownSample, line};

/// Names of runs that an error lists.
const LISTED: usize = 20;
/// Groups whose samples are shown.
const GROUPS: usize = 4;
/// Most curves and rows of staleness that are taken.
const PARTS: usize = 1000;

/// The run that is wanted.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// One that runs, else the newest.
    Newest,
    /// The one with this name.
    Named(String),
    /// The one with this folder's name that began at this time, in UTC. This process reads its folder too.
    Begun {
        /// Name.
        name: String,
        /// Time.
        started: String,
    },
}

/// A row of `/api/runs`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    pub name: String,
    pipeline: String,
    state: String,
    step: u64,
    planned: Option<u64>,
    started: String,
    seconds: f64,
    page: Option<String>,
    /// If true, the process of the page runs it.
    pub live: bool,
}

/// The parts of `/api/runs/NAME` that the view shows.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Report {
    curves: BTreeMap<String, Points>,
    stages: Vec<StageShares>,
    bottleneck: String,
    staleness: Vec<(u64, u64)>,
    /// Samples of the newest groups, from routes apart.
    #[serde(skip)]
    pub samples: Vec<ShownSample>,
    facts: Vec<(String, String)>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Points {
    /// Step, smoothed value, lower and upper bound, value.
    points: Vec<[f64; 5]>,
}

/// The answer of `/api/runs/NAME/samples`: the newest first.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Found {
    rows: Vec<ShownSample>,
}

impl Found {
    /// Names of a sample of each of the newest groups, the newest first.
    pub fn groups(&self) -> Vec<String> {
        let mut seen = Vec::new();
        for row in &self.rows {
            if !seen.iter().any(|(at, _)| *at == (row.step, row.group)) && seen.len() < GROUPS {
                seen.push(((row.step, row.group), format!("{}-{}-{}", row.step, row.group, row.index)));
            }
        }
        seen.into_iter().map(|(_, key)| key).collect()
    }
}

/// The answer of `/api/runs/NAME/samples/KEY`: the samples of a group.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Samples {
    prompt: Vec<Turn>,
    samples: Vec<ShownSample>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Turn {
    role: String,
    text: String,
}

impl Samples {
    /// The samples, each with the prompt.
    pub fn shown(self) -> Vec<ShownSample> {
        let alone = self.prompt.len() == 1;
        let turn = |Turn { role, text }: &Turn| if alone { text.clone() } else { format!("{role}: {text}") };
        let prompt = self.prompt.iter().map(turn).collect::<Vec<_>>().join("\n");
        self.samples.into_iter().map(|sample| ShownSample { prompt: prompt.clone(), ..sample }).collect()
    }
}

/// The wanted row among those of a page, which begin with the newest.
pub fn choose(rows: Vec<Row>, wanted: &Wanted) -> Result<Row, PageError> {
    let found = |fits: &dyn Fn(&Row) -> bool| rows.iter().find(|row| fits(row)).cloned();
    match wanted {
        Wanted::Newest => found(&|row| row.live)
            .or_else(|| found(&|row| row.state == "running"))
            .or_else(|| found(&|_| true))
            .ok_or(PageError::Empty),
        Wanted::Named(name) => found(&|row| row.name == *name).ok_or_else(|| {
            let mut listed: Vec<String> = rows.iter().take(LISTED).map(|row| line(&row.name)).collect();
            listed.extend((rows.len() > LISTED).then(|| format!("{} more", rows.len() - LISTED)));
            PageError::Unknown { name: name.clone(), listed }
        }),
        Wanted::Begun { name, started } => {
            found(&|row| row.live && row.started == *started && row.name.rsplit('/').next() == Some(name)).ok_or(PageError::Other)
        }
    }
}

impl Row {
    /// Brings the view up to date; the row was read at `read`.
    pub fn show(&self, read: Instant, view: &mut RunView) {
        (view.name, view.pipeline, view.state) = (line(&self.name), line(&self.pipeline), line(&self.state));
        (view.step, view.planned) = (self.step.max(view.live_step), self.planned);
        let running = self.state == "running";
        view.seconds = self.seconds + if running { read.elapsed().as_secs_f64() } else { 0.0 };
        view.note = match &self.page {
            Some(page) if running && !self.live => {
                format!("the run's own page has its stages, edges and engines: rollflow top {}", line(page.trim_end_matches('/')))
            }
            _ => String::new(),
        };
    }
}

impl Report {
    /// Brings the view up to date.
    pub fn show(self, view: &mut RunView) {
        let curve = |(name, curve): (String, Points)| {
            let points = curve.points.into_iter().map(|[step, .., value]| (step, value));
            (line(&name), points.collect::<Curve>())
        };
        view.curves = self.curves.into_iter().take(PARTS).map(curve).collect();
        view.samples.clear();
        self.samples.into_iter().for_each(|sample| view.add_sample(sample));
        view.set_facts(self.facts);
        // A running flow has newer ones.
        if view.edges.is_empty() {
            view.bottleneck = line(&self.bottleneck);
            view.set_stages(self.stages);
            view.staleness = self.staleness.into_iter().take(PARTS).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(names: &[(&str, &str, bool)]) -> Vec<Row> {
        let row = |(name, state, live): &(&str, &str, bool)| Row {
            name: (*name).to_owned(),
            state: (*state).to_owned(),
            started: format!("{name}'s"),
            live: *live,
            ..Row::default()
        };
        names.iter().map(row).collect()
    }

    #[test]
    fn a_run_that_resumed_from_an_earlier_step_shows_that_step() {
        let mut view = RunView { live_step: 151, ..RunView::default() };
        let mut show = |step, ended| {
            if ended {
                view.end_live();
            }
            Row { step, ..Row::default() }.show(Instant::now(), &mut view);
            view.step
        };
        assert_eq!([show(150, false), show(150, true), show(100, false)], [151, 150, 100]);
    }

    #[test]
    fn the_wanted_run_is_chosen_and_an_unknown_name_lists_the_others() {
        let all = rows(&[("new", "finished", false), ("b", "running", false), ("c", "running", true)]);
        let chosen = |count: usize, wanted| choose(all[..count].to_vec(), &wanted).map(|row| row.name);
        assert_eq!(chosen(3, Wanted::Newest).unwrap(), "c");
        assert_eq!(chosen(2, Wanted::Newest).unwrap(), "b");
        assert_eq!(chosen(1, Wanted::Newest).unwrap(), "new");
        assert!(matches!(chosen(0, Wanted::Newest), Err(PageError::Empty)));
        assert_eq!(chosen(3, Wanted::Named("b".into())).unwrap(), "b");
        let error = chosen(3, Wanted::Named("d".into())).unwrap_err().to_string();
        assert_eq!(error, "the live page has no run \"d\"; it has new, b, c");
        let begun = |name: &str| chosen(3, Wanted::Begun { name: name.into(), started: format!("{name}'s") });
        assert_eq!(begun("c").unwrap(), "c");
        assert!(matches!(begun("b"), Err(PageError::Other)), "no process of the page runs it");
    }
}
