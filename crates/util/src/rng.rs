//! Keyed random numbers (splitmix64): the same key gives the same number on every machine.

/// Distance between two states of a stream: 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// State `nth` of the stream that begins at `key`, before mixing.
#[inline]
pub fn state(key: u64, nth: u64) -> u64 {
    key.wrapping_add(offset(nth))
}

/// Distance of state `nth` from the stream's key.
#[inline]
pub fn offset(nth: u64) -> u64 {
    nth.wrapping_mul(STEP)
}

/// Hash in which every bit depends on all bits of `bits` (the finalizer of splitmix64).
#[inline]
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Number in [0, 1) from the upper 53 bits of a hash.
#[inline]
pub fn to_unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// Number in [0, 1) keyed by `key` and `nth`.
#[inline]
pub fn unit(key: u64, nth: u32) -> f64 {
    to_unit(mix(state(key, u64::from(nth))))
}
