//! Packed sequences as layers with a state compute them: in chunks, a prefix before those that continue it.

use std::cmp::Reverse;

use tch::{Device, Tensor};

use super::fused::Steps;
use super::gated_delta::{CHUNK, GatedDelta};
use super::{Packed, upload};

/// Rows of a pass for its gated delta nets.
///
/// The convolution's inputs are the packed rows, a row of zeros, and, where sequences have begun before,
/// what is left of their inputs. Chunks lie in the order in which they are computed.
pub(super) struct NetRows {
    /// Tokens of a chunk.
    pub chunk: i64,
    /// Inputs of each chunk: those of its tokens, after those that the convolution sees before them. Padding is
    /// a row of zeros.
    pub sources: Tensor,
    /// Of these, those of the tokens.
    pub tokens: Tensor,
    /// The chunks' token of each packed row.
    pub cells: Tensor,
    pub steps: Steps,
    /// Sequences that continue no other, in the order of their states; and of each of them, the state.
    pub begun: [Tensor; 2],
    /// Last inputs of each of them.
    left: Tensor,
}

impl NetRows {
    /// `remember`: the sequences that continue no other have states before.
    pub fn new(packed: &Packed, of: &GatedDelta, remember: bool, device: Device) -> Self {
        let ranges: Vec<_> = packed.ranges().collect();
        let (seen, zeros) = (of.kernel - 1, packed.len());
        let chunk = packed.lens.iter().copied().max().unwrap_or(0).clamp(1, CHUNK as usize);
        let (begun, continued): (Vec<usize>, Vec<usize>) =
            (0..ranges.len()).partition(|sequence| packed.prefixes[*sequence].is_none());
        // Inputs of the sequences that have begun before follow the zeros.
        let mut kept = vec![None; ranges.len()];
        begun.iter().filter(|_| remember).enumerate().for_each(|(at, sequence)| kept[*sequence] = Some(zeros + 1 + at * seen));
        // The row that is so many before the sequence's first.
        let before = |sequence: usize, by: usize| match (packed.prefixes[sequence], kept[sequence]) {
            (Some(prefix), _) if by <= ranges[prefix].len() => ranges[prefix].end - by,
            (Some(prefix), _) => kept[prefix].map_or(zeros, |first| first + seen + ranges[prefix].len() - by),
            (None, Some(first)) => first + seen - by,
            (None, None) => zeros,
        };
        let row = |sequence: usize, at: i64| match usize::try_from(at) {
            Ok(at) if at < ranges[sequence].len() => ranges[sequence].start + at,
            Ok(_) => zeros,
            Err(_) => before(sequence, at.unsigned_abs() as usize),
        };
        let chunks = |sequence: usize| ranges[sequence].len().div_ceil(chunk);

        let (mut sources, mut cells, mut steps) = (Vec::new(), vec![0; packed.len()], Vec::new());
        let mut states = Vec::new();
        let mut second = -1;
        for mut together in [begun.clone(), continued] {
            if together.first().is_some_and(|first| packed.prefixes[*first].is_some()) {
                second = steps.len() as i64;
            }
            // The longest first: those that are left are neighbours.
            together.sort_by_key(|sequence| Reverse(chunks(*sequence)));
            for at in 0..together.first().map_or(0, |longest| chunks(*longest)) {
                let going = together.iter().take_while(|sequence| chunks(**sequence) > at);
                let first = sources.len() / (seen + chunk);
                for sequence in going.clone() {
                    let (begin, cell) = (at * chunk, sources.len() / (seen + chunk) * chunk);
                    sources.extend((begin as i64 - seen as i64..(begin + chunk) as i64).map(|at| row(*sequence, at) as i64));
                    let own = ranges[*sequence].clone().skip(begin).take(chunk);
                    own.enumerate().for_each(|(at, row)| cells[row] = (cell + at) as i64);
                }
                steps.push([first, going.count(), states.len()].map(|number| number as i64));
            }
            states.extend(together);
        }
        let place = |of: &[usize]| {
            let mut place = vec![0; ranges.len()];
            of.iter().enumerate().for_each(|(at, sequence)| place[*sequence] = at as i64);
            place
        };
        let (state_of, begun_of) = (place(&states), place(&begun));
        let (first, further) = states.split_at(begun.len());
        let prefixes: Vec<i64> =
            further.iter().filter_map(|sequence| packed.prefixes[*sequence]).map(|prefix| state_of[prefix]).collect();
        let left = begun.iter().flat_map(|&sequence| {
            let len = ranges[sequence].len() as i64;
            (len - seen as i64..len).map(move |at| (sequence, at))
        });
        let left: Vec<i64> = left.map(|(sequence, at)| row(sequence, at) as i64).collect();
        let chosen = |of: &[usize], from: &[i64]| upload(&of.iter().map(|sequence| from[*sequence]).collect::<Vec<_>>(), device);
        let sources = upload(&sources, device).view([-1, (seen + chunk) as i64]);
        NetRows {
            chunk: chunk as i64,
            tokens: sources.narrow(1, seen as i64, chunk as i64).reshape([-1]),
            sources: sources.view([-1]),
            cells: upload(&cells, device),
            begun: [chosen(first, &begun_of), chosen(&begun, &state_of)],
            left: upload(&left, device),
            steps: Steps {
                steps,
                second,
                begun: begun.len() as i64,
                sequences: ranges.len() as i64,
                prefixes: (!prefixes.is_empty()).then(|| upload(&prefixes, device)),
            },
        }
    }
    /// The last inputs of each sequence that continues no other, of `inputs` and, after them, `others`.
    pub fn left_of(&self, inputs: &Tensor, others: &Tensor) -> Tensor {
        let tokens = inputs.size()[0];
        let [own, other] = [self.left.clamp_max(tokens - 1), (&self.left - tokens).clamp_min(0)];
        let is_own = self.left.less(tokens).unsqueeze(1);
        inputs.index_select(0, &own).where_self(&is_own, &others.index_select(0, &other))
    }
}
