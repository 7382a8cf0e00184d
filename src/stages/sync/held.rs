//! Tensors of one version in the trainer's memory, in pieces for servers.

use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::links::Links;
use crate::engine::remote::transfer::{GroupInvitation, Piece, SharedMemory, TensorSource};
use crate::model::stream::Event;
use crate::model::{Dtype, Entry, Weights};

/// Bytes of a piece, unless one tensor has more. A server holds one in addition to its weights.
pub(crate) const PIECE: usize = 256 << 20;

/// Tensors of one version, end to end and read-only.
#[derive(Debug)]
pub(super) struct HeldTensors {
    flat: Tensor,
    /// After the last write.
    written: Event,
    pieces: Vec<Piece>,
    /// Numbers of each piece.
    ranges: Vec<Range<usize>>,
    links: Arc<Links>,
}

// SAFETY: libtorch counts references atomically, and nothing writes to the numbers after `new`.
unsafe impl Sync for HeldTensors {}

impl HeldTensors {
    /// Tensors in the format `dtype` on the device of `links`: those of `weights`, and `also`, which are other
    /// names for some of them. Weights in another format or place are copied.
    pub fn new(weights: &Weights, dtype: Dtype, also: &[Entry], links: &Arc<Links>) -> Self {
        let flat = weights.merged().flat.detach().to_device(links.device()).to_kind(dtype.kind());
        let written = Event::now(flat.device());
        let (mut pieces, mut ranges) = (Vec::<Piece>::new(), Vec::<Range<usize>>::new());
        for entry in weights.layout.entries().iter().chain(also) {
            let bytes = entry.len() * dtype.bytes();
            let fits = |(piece, range): (&mut Piece, &mut Range<usize>)| {
                let joins = range.end == entry.offset && piece.bytes.iter().sum::<usize>() + bytes <= PIECE;
                joins.then(|| range.end += entry.len()).is_some()
            };
            if !pieces.last_mut().zip(ranges.last_mut()).is_some_and(fits) {
                pieces.push(Piece { dtype: dtype.name(), ..Piece::default() });
                ranges.push(entry.range());
            }
            if let Some(piece) = pieces.last_mut() {
                piece.names.push(entry.name.clone());
                piece.shapes.push(entry.shape.clone());
                piece.bytes.push(bytes);
            }
        }
        HeldTensors { flat, written, pieces, ranges, links: links.clone() }
    }

    /// Number by which versions are compared: the sum of the numbers' bits.
    pub fn sum(&self) -> i64 {
        let kind = if self.flat.kind() == Kind::Float { Kind::Int } else { Kind::Int16 };
        let bits = self.flat.view_dtype(kind);
        (0..bits.size()[0]).step_by(STEP).fold(0, |sum, at| {
            let part = bits.narrow(0, at, (bits.size()[0] - at).min(STEP as i64));
            part.sum(Kind::Int64).int64_value(&[]).wrapping_add(sum.wrapping_mul(31))
        })
    }

    /// Bytes of a piece.
    fn piece(&self, at: usize) -> Tensor {
        let range = &self.ranges[at];
        self.flat.narrow(0, range.start as i64, range.len() as i64).view_dtype(Kind::Uint8)
    }
}

/// Numbers of a sum, whose conversion takes memory.
const STEP: usize = 1 << 24;

impl TensorSource for HeldTensors {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn link(&self, server: &str) -> Option<String> {
        self.links.name(server)
    }

    fn open_group(&self, server: &str, host: &str, port: u16, ranks: usize) -> Result<GroupInvitation, String> {
        self.links.open_group(server, host, port, ranks)
    }

    fn open_nccl(&self, server: &str, ranks: usize) -> Result<Vec<u8>, String> {
        self.links.open_nccl(server, ranks)
    }

    fn share_memory(&self, server: &str) -> Result<SharedMemory, String> {
        let largest = self.pieces.iter().map(|piece| piece.bytes.iter().sum()).max().unwrap_or(0);
        self.links.share_memory(server, largest)
    }

    fn join(&self, server: &str) -> Result<(), String> {
        self.links.join(server)
    }

    fn send(&self, server: &str, piece: usize) -> Result<(), String> {
        self.written.before([&self.flat]);
        self.links.send(server, &self.piece(piece))
    }

    fn close(&self, server: &str) {
        self.links.close(server);
    }
}
