//! Streams of a GPU: work of different threads that neither waits for the other.
//!
//! A thread's work goes to its current stream, and all threads share one unless told otherwise. A
//! generator has a stream of high priority, so that a decoding step does not queue up after a trainer's
//! micro-batch. Tensors of one stream that another reads need an [`Event`] in between; published weights
//! hold one.

use std::ffi::c_char;
use std::ptr::NonNull;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::c_text::check;

#[repr(C)]
struct CEvent {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rollflow_stream_new(device: i64, stream: *mut i64) -> *mut c_char;
    fn rollflow_stream_exchange(stream: *mut i64) -> *mut c_char;
    fn rollflow_stream_synchronize(device: i64) -> *mut c_char;
    fn rollflow_memory_give_back() -> *mut c_char;
    fn rollflow_event_new(device: i64, event: *mut *mut CEvent) -> *mut c_char;
    fn rollflow_event_wait(device: i64, event: *mut CEvent) -> *mut c_char;
    fn rollflow_event_free(event: *mut CEvent);
    fn rollflow_stream_uses(tensor: *mut C_tensor) -> *mut c_char;
    fn rollflow_pinned(out: *mut *mut C_tensor, tensor: *mut C_tensor) -> *mut c_char;
}

/// A stream of a GPU; nothing on a processor.
pub(crate) struct Stream(Option<[i64; 3]>);

impl Stream {
    /// A stream of high priority.
    pub fn new(device: Device) -> Self {
        let Device::Cuda(index) = device else { return Stream(None) };
        let mut stream = [0; 3];
        check(unsafe { rollflow_stream_new(index as i64, stream.as_mut_ptr()) });
        Stream(Some(stream))
    }

    /// Makes it this thread's current stream until the guard is dropped.
    pub fn enter(&self) -> Entered {
        Entered(self.0.map(|mut stream| {
            check(unsafe { rollflow_stream_exchange(stream.as_mut_ptr()) });
            stream
        }))
    }
}

/// The thread's stream before.
pub(crate) struct Entered(Option<[i64; 3]>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(mut before) = self.0 {
            check(unsafe { rollflow_stream_exchange(before.as_mut_ptr()) });
        }
    }
}

/// Waits for the work of this thread's stream on a device.
pub(crate) fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        check(unsafe { rollflow_stream_synchronize(index as i64) });
    }
}

/// A copy in pinned memory of the host, which a GPU reads while the host works. libtorch reuses the memory
/// after the GPU has read it.
pub(super) fn pinned(tensor: &Tensor) -> Tensor {
    let mut out = std::ptr::null_mut();
    check(unsafe { rollflow_pinned(&mut out, tensor.as_ptr().cast_mut()) });
    // SAFETY: a tensor that was made for this.
    unsafe { Tensor::from_ptr(out) }
}

/// Gives the memory of freed tensors on GPUs, which libtorch keeps for later ones, to other processes.
/// Waits for the work on `device`.
pub(crate) fn give_back_memory(device: Device) {
    if let Device::Cuda(_) = device {
        synchronize(device);
        check(unsafe { rollflow_memory_give_back() });
    }
}

/// A place in a stream of a GPU, after all that its thread had asked for.
#[derive(Debug)]
pub(crate) struct Event(Option<(i64, NonNull<CEvent>)>);

// SAFETY: CUDA's events may be waited for by all threads, and this one is recorded once, before it is shared.
unsafe impl Send for Event {}
unsafe impl Sync for Event {}

impl Event {
    /// After what this thread has asked of a device.
    pub fn now(device: Device) -> Self {
        let Device::Cuda(index) = device else { return Event(None) };
        let mut event = std::ptr::null_mut();
        check(unsafe { rollflow_event_new(index as i64, &mut event) });
        Event(NonNull::new(event).map(|event| (index as i64, event)))
    }

    /// Lets this thread's stream wait for it, and uses tensors that were made before it.
    pub fn before<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) {
        let Some((device, event)) = self.0 else { return };
        check(unsafe { rollflow_event_wait(device, event.as_ptr()) });
        for tensor in tensors {
            check(unsafe { rollflow_stream_uses(tensor.as_ptr().cast_mut()) });
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some((_, event)) = self.0 {
            // SAFETY: made by `now`, and freed once.
            unsafe { rollflow_event_free(event.as_ptr()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::model::{Compute, Dtype};

    /// A negative control: the stand-in of a GPU finds what lacks an event, whichever way it runs there.
    #[test]
    fn work_of_two_streams_on_a_tensor_needs_an_event_in_between() {
        let stand_in = unsafe { libloading::os::unix::Library::this().get::<*const ()>(b"stand_in_counts\0").is_ok() };
        if !stand_in || Compute::cuda(0, Dtype::F32).check().is_err() {
            return eprintln!("skipped: only the stand-in of a GPU finds races");
        }
        let device = Device::Cuda(0);
        let written = Tensor::ones([4], (Kind::Float, device)) * 3.0;
        let stream = Stream::new(device);
        let read = || (&written + 1.0).to_device(Device::Cpu).double_value(&[0]);
        {
            let _stream = stream.enter();
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read));
            assert!(panicked.is_err(), "a read without an event is a race");
        }
        let event = Event::now(device);
        let _stream = stream.enter();
        event.before([&written]);
        assert_eq!(read(), 4.0);
        // Memory that another stream reads is not given back to its own one meanwhile.
        drop(written);
        assert!(Tensor::ones([4], (Kind::Float, device)).f_add_scalar(1.0).is_ok());
    }
}
