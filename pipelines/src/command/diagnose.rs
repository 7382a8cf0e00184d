//! `rollflow diagnose`: what limited a run, where its tokens went, and what looks unhealthy.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use rollflow::util::causes::full_message;
use rollflow::util::untrusted;
use serde_json::json;

use super::{End, out, require_run};
use crate::diagnose::forecast::{self, Changed, Forecasts};
use crate::diagnose::{Evidence, Finding, plots, setting_of};
use crate::registry::Registry;
use crate::run::record::{Record, State};

/// Say what limited a run, where its tokens went, what other settings would gain and what looks unhealthy
/// in its learning, each with its figure and the page that explains it. Exit code 1 if anything was found.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow diagnose runs/mine")]
pub struct Diagnose {
    /// The run's folder.
    run: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Diagnose {
    pub fn run(self, registry: &Registry) -> Result<()> {
        require_run(&self.run)?;
        let record = Record::read(&self.run)?;
        let evidence = Evidence::read(&self.run, &record)?;
        let findings = evidence.findings();
        // A run that can't be simulated is diagnosed all the same.
        let forecasts = forecast::of(&self.run, registry);
        let drawn = &record.drawn;
        out::text(&match self.json {
            true => {
                json!({"run": self.run, "state": record.state, "steps": record.steps, "bottleneck": drawn.bottleneck,
                    "stages": drawn.stages, "tokens": drawn.tokens.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
                    "forecasts": forecasts.ok().flatten(), "findings": findings})
                .to_string()
                    + "\n"
            }
            false => self.page(&record, &plots::of(&evidence), &forecasts, &findings),
        })?;
        if findings.is_empty() { Ok(()) } else { Err(End::Said(1).into()) }
    }

    fn page(&self, record: &Record, plots: &str, forecasts: &Result<Option<Forecasts>>, findings: &[Finding]) -> String {
        let drawn = &record.drawn;
        let mut page = format!("{}: {}, {} steps\n", untrusted::path(&self.run), record.state.word(), record.steps);
        let unknown = match record.state {
            State::Running => Some("known when the run has ended\n"),
            State::Died => Some("not known: its process ended without notice\n"),
            _ if drawn.stages.is_empty() => Some("not known: the run did not record it\n"),
            _ => None,
        };
        page += "\nwhat limited it\n";
        if drawn.stages.is_empty() {
            page += &format!("  {}", unknown.unwrap_or_default());
        } else {
            let states = ["busy", "starved", "blocked", "credit", "weights"];
            let share = |value: Option<&f64>| value.map_or_else(String::new, |share| format!("{:.0}%", 100.0 * share));
            let row = |name: &str, cells: Vec<String>| [vec![format!("  {name}")], cells].concat();
            let mut rows = vec![row("stage", states.map(str::to_owned).to_vec())];
            let cells = |stage: &rollflow::observe::StageShares| states.map(|state| share(stage.shares.get(state))).to_vec();
            rows.extend(drawn.stages.iter().map(|stage| row(&untrusted::line(&stage.name), cells(stage))));
            page += &out::aligned(&rows);
            page +=
                &if drawn.bottleneck.is_empty() { String::new() } else { format!("  {}\n", untrusted::line(&drawn.bottleneck)) };
        }
        let all: f64 = drawn.tokens.iter().map(|(_, tokens)| tokens).sum();
        page += "\nwhere generated tokens went\n";
        if all > 0.0 {
            let row = |(fate, tokens): &(String, f64)| {
                vec![
                    format!("  {fate}"),
                    format!("{tokens}"),
                    format!("{:.1}%", 100.0 * tokens / all),
                    setting_of(fate).to_owned(),
                ]
            };
            page += &out::aligned(&drawn.tokens.iter().map(row).collect::<Vec<_>>());
        } else {
            page += &format!("  {}", unknown.unwrap_or("no ledger was kept\n"));
        }
        if !plots.is_empty() {
            page += &format!("\ncurves, smoothed{plots}");
        }
        page += "\nwhat other settings would gain\n";
        page += &match forecasts {
            Ok(Some(forecasts)) => gains(forecasts),
            Ok(None) => format!("  {}", unknown.unwrap_or(NO_FORECAST)),
            Err(error) => format!("  not known: {}\n", untrusted::block(&full_message(error.as_ref()))),
        };
        page += &format!("\nfindings: {}\n", if findings.is_empty() { "none".to_owned() } else { findings.len().to_string() });
        for Finding { check, figure, advice, page: section } in findings {
            page += &format!("  {check}: {figure}\n    do: {advice}\n    see: {section}\n");
        }
        page
    }
}

/// Reason why a finished run has no forecast.
const NO_FORECAST: &str = "not known: only runs that sampled in their own process, without an environment, are simulated\n";

/// A row per setting, and how far the simulation is to be trusted.
fn gains(forecasts: &Forecasts) -> String {
    let row = |Changed { set, gain, staleness, wasted }: &Changed| {
        vec![
            format!("  {set}"),
            format!("{:+.0}%", 100.0 * gain),
            format!("staleness up to {staleness}"),
            format!("{:.0}% of tokens not trained", 100.0 * wasted),
        ]
    };
    let rows = out::aligned(&forecasts.changed.iter().map(row).collect::<Vec<_>>());
    format!(
        "{rows}  steps an hour, simulated on the run's own times: {:.0} as it was, where it made {:.0}. What is learned from\n  \
         staler tokens, and that stages share a machine's cores, is not simulated.\n",
        forecasts.simulated, forecasts.made
    )
}
