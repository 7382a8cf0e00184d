//! `rollflow tail`: samples of a run as it records them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use rollflow::data::{Sample, Status};
use rollflow::observe::logs::Rollout;
use rollflow::util::{lock_file, untrusted};

use super::condition::{Condition, status_word};
use super::rollouts::asked;
use super::{out, require_run};
use crate::run::LOCK;
use crate::run::growing::GrowingLines;

/// Time between two looks at the file.
const POLL: Duration = Duration::from_millis(200);

/// Longest prompt or completion that is shown, in characters.
const CELL: usize = 120;

/// Print the samples of a run as it records them, a line each: the last ones, then new ones until
/// the run ends.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow tail runs/mine\n\
\x20 rollflow tail runs/mine --last 100 --where 'reward < 0.5 && length >= 200 && status == \"truncated\"'")]
pub struct Tail {
    /// The run's folder.
    run: PathBuf,
    /// Show the last so many samples that are there.
    #[arg(long, value_name = "N", default_value_t = 10)]
    last: usize,
    /// Only samples that fit, as in 'reward < 0.5 && length > 200'. Fields: step, group, sample,
    /// reward, reward.PART, advantage, length, status, metadata.KEY.
    #[arg(long = "where", value_name = "CONDITION", value_parser = Condition::parse)]
    condition: Option<Condition>,
}

impl Tail {
    pub fn run(self) -> Result<()> {
        require_run(&self.run)?;
        let colours = out::is_coloured(&std::io::stdout());
        let mut file = GrowingLines::of(self.run.join("rollouts.jsonl"));
        let fitting = |line: &[u8]| match serde_json::from_slice::<Rollout>(line) {
            Ok(rollout) => {
                let (step, sample) = (rollout.step, rollout.into_sample());
                let fits = self.condition.as_ref().is_none_or(|condition| condition.holds(Some(step), &sample));
                fits.then(|| shown(step, &sample, colours))
            }
            Err(error) => {
                out::complain(&format!("warning: a damaged line is skipped: {error}"));
                None
            }
        };
        let mut last = VecDeque::new();
        let mut going = lock_file::is_taken(&self.run.join(LOCK));
        file.each_new(|line| {
            last.extend(fitting(line.bytes));
            last.drain(..last.len().saturating_sub(self.last));
            Ok(())
        })?;
        ensure!(
            going || file.read() > 0,
            "{} records no samples; observe.rollouts_every = 1 records those of every step",
            self.run.display()
        );
        last.iter().try_for_each(|line| out::escaped(line))?;
        while going {
            sleep(POLL);
            // The run's last lines are there before it gives the lock back.
            going = lock_file::is_taken(&self.run.join(LOCK));
            file.each_new(|line| fitting(line.bytes).iter().try_for_each(|line| out::escaped(line)))?;
        }
        Ok(())
    }
}

/// The line of a sample, with its end. Texts of foreign origin are escaped and bounded.
fn shown(step: u64, sample: &Sample, colours: bool) -> String {
    let [green, red, yellow, dim] = ["32", "31", "33", "2"];
    let painted = |text: &str, colour: &str| if colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() };
    let reward = sample.reward.map_or_else(|| "reward –".to_owned(), |reward| format!("reward {reward:.3}"));
    let reward = match sample.advantage {
        Some(advantage) if advantage > 0.0 => painted(&reward, green),
        Some(advantage) if advantage < 0.0 => painted(&reward, red),
        _ => reward,
    };
    let status = match sample.status {
        Status::Completed => status_word(sample.status).to_owned(),
        other => painted(status_word(other), yellow),
    };
    let text = |text: &str| untrusted::line_of(text, CELL);
    format!(
        "step {step} · {}/{} · {reward} · {} tokens · {status} · {} {} {}\n",
        sample.group_index,
        sample.index,
        sample.generated(),
        painted(&text(asked(sample)), dim),
        painted("→", dim),
        text(&sample.response),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Sample {
        Sample {
            group_index: 4,
            index: 1,
            reward: Some(0.5),
            advantage: Some(-1.0),
            response: "a\n\x1b[2Jb".into(),
            ..Sample::default()
        }
    }

    #[test]
    fn a_sample_is_one_line_with_its_text_escaped() {
        let line = shown(3, &sample(), false);
        assert_eq!(line, "step 3 · 4/1 · reward 0.500 · 0 tokens · pending ·  → a\\n\\u{1b}[2Jb\n");
        let long = shown(3, &Sample { response: "x".repeat(1000), ..sample() }, false);
        assert!(long.contains("… (880 more characters)"), "{long}");
    }

    #[test]
    fn colours_show_the_advantage_and_samples_that_did_not_end() {
        let line = shown(3, &sample(), true);
        assert!(line.contains("\x1b[31mreward 0.500\x1b[0m") && line.contains("\x1b[33mpending\x1b[0m"), "{line:?}");
        assert!(!line.contains("\x1b[2J"), "only our own escapes: {line:?}");
        let line = shown(3, &Sample { advantage: Some(1.0), status: Status::Completed, ..sample() }, true);
        assert!(line.contains("\x1b[32mreward") && line.contains(" completed "), "{line:?}");
    }
}
