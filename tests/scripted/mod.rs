//! A generator that follows a script.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use rollflow::data::SampledToken;
use rollflow::engine::OlderVersions;
use rollflow::flow::{Signal, WeightsRx};
use rollflow::prelude::*;
use rollflow::rollout::Admission;

/// A number below `below`, drawn by `key`: the script.
pub fn draw(key: &[u64], below: u64) -> u64 {
    let mix = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    (key.iter().fold(0x1234_5678_9ABC_DEF1, mix).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 33) % below.max(1)
}

pub fn pause(micros: u64) {
    if micros > 0 {
        std::thread::sleep(Duration::from_micros(micros));
    }
}

/// Answers prompts with tokens of the newest weights, one group at a time, as slowly as the script says.
pub struct Script {
    pub weights: WeightsRx<u64>,
    pub admission: Admission,
    pub seed: u64,
    pub samples: u32,
    pub longest: u64,
    pub slowest: u64,
    /// If true, tokens are of the oldest versions that may sample them.
    pub older: bool,
}

impl Stage for Script {
    type In = Prompt;
    type Out = Group;

    fn run(&mut self, io: &mut Io<Prompt, Group>) -> Result<(), StageError> {
        io.wait_weights(&mut self.weights, 0)?;
        while io.signal() != Signal::Stop {
            let Some(prompt) = io.recv()? else { break };
            let ordinal = prompt.ordinal;
            let mut samples: Vec<Sample> = (0..self.samples).map(|index| Sample::begin(&prompt, index, &[5])).collect();
            for index in 0..self.samples {
                self.admission.discard(ordinal, index);
            }
            for sample in &mut samples {
                for position in 0..1 + draw(&[self.seed, ordinal, u64::from(sample.index), 1], self.longest) {
                    pause(draw(&[self.seed, ordinal, position, 2], self.slowest));
                    let newest = self.weights.version().unwrap();
                    let oldest = self.admission.oldest(ordinal).min(newest);
                    let version = if self.older && self.admission.claim(ordinal, oldest) { oldest } else { newest };
                    sample.push(7, -1.0, version);
                    let (index, status) = (sample.index, Status::Pending);
                    self.admission.sampled([SampledToken {
                        ordinal,
                        index,
                        token: 7,
                        log_prob: -1.0,
                        version,
                        status,
                        routes: None,
                    }]);
                }
                sample.status = Status::Completed;
            }
            io.send(Group { samples, prompt: Arc::new(prompt), ..Group::default() })?;
        }
        Ok(())
    }
}
