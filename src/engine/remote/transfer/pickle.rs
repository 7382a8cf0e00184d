//! Handles of GPU memory in Python's pickle format, which vLLM's backend `ipc` reads from requests.

use super::SharedMemory;

/// Pickle of `{gpu: arguments}` with the arguments of torch's `rebuild_cuda_tensor` for the memory as one
/// tensor of bytes.
pub(super) fn handles(memory: &SharedMemory) -> Vec<u8> {
    let mut out = Pickle(vec![0x80, 3]);
    out.op(b'}');
    out.text(&memory.gpu);
    out.op(b'(');
    out.global("torch", "Tensor");
    out.tuple(|out| out.int(memory.bytes as i64));
    out.tuple(|out| out.int(1));
    out.int(0);
    out.global("torch.storage", "UntypedStorage");
    out.global("torch", "uint8");
    out.int(memory.device as i64);
    // The driver's handle alone is torch's oldest format, which all versions read.
    out.bytes(&memory.handle);
    out.int(memory.bytes as i64);
    out.int(0);
    out.op(0x89);
    // The trainer keeps the memory by itself: torch finds no counter of this name, and continues.
    out.bytes(b"/rollflow_counts_no_readers");
    out.int(0);
    // The trainer has waited for its writes: there is no event.
    out.bytes(b"");
    out.op(0x89);
    out.op(b't');
    out.op(b's');
    out.op(b'.');
    out.0
}

/// Pickle of protocol 3.
struct Pickle(Vec<u8>);

impl Pickle {
    fn op(&mut self, code: u8) {
        self.0.push(code);
    }

    fn counted(&mut self, code: u8, bytes: &[u8]) {
        self.op(code);
        self.0.extend((bytes.len() as u32).to_le_bytes());
        self.0.extend(bytes);
    }

    fn text(&mut self, text: &str) {
        self.counted(b'X', text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.counted(b'B', bytes);
    }

    fn int(&mut self, number: i64) {
        self.op(0x8a);
        self.op(8);
        self.0.extend(number.to_le_bytes());
    }

    fn global(&mut self, module: &str, name: &str) {
        self.0.extend(format!("c{module}\n{name}\n").bytes());
    }

    /// Tuple of one item.
    fn tuple(&mut self, item: impl FnOnce(&mut Self)) {
        item(self);
        self.op(0x85);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    /// Python's reader, with names instead of torch's classes.
    const READ: &str = "
import io, pickle, sys
class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return f'{module}.{name}'
print(Reader(io.BytesIO(sys.stdin.buffer.read())).load())";

    #[test]
    fn python_reads_the_arguments_of_rebuild_cuda_tensor() {
        let memory = SharedMemory { handle: b"ab\0".to_vec(), bytes: 1 << 33, device: 3, gpu: "10-20".to_owned() };
        let mut python = Command::new("python3").args(["-c", READ]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        python.stdin.take().unwrap().write_all(&handles(&memory)).unwrap();
        let read = String::from_utf8(python.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(
            read.trim(),
            "{'10-20': ('torch.Tensor', (8589934592,), (1,), 0, 'torch.storage.UntypedStorage', 'torch.uint8', 3, b'ab\\x00', \
             8589934592, 0, False, b'/rollflow_counts_no_readers', 0, b'', False)}"
        );
    }
}
