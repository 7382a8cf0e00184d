//! Bits that depend on a key alone: the same for the same key, on every machine.

/// Bits that depend on all bits given (the finalizer of splitmix64).
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A number in [0, 1) by `key` and `nth`.
pub(crate) fn unit(key: u64, nth: u32) -> f64 {
    (mix(key.wrapping_add(u64::from(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 11) as f64 / (1_u64 << 53) as f64
}
