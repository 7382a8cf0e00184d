//! Bytes of numbers as differences from earlier ones: pure functions.
//!
//! A delta is the number of words that differ, the distance of each from the one before, and the
//! exclusive or of their old and new bits. Small steps change few bits, so the words are stored by
//! planes: the first byte of all, then the second. Compression makes use of both.

/// Bytes of `words` of `width` bytes each, grouped by their place in the word. Bytes beyond the last
/// whole word follow unchanged.
pub(crate) fn to_planes(width: usize, words: &[u8]) -> Vec<u8> {
    let whole = words.len() - words.len() % width;
    let mut planes = Vec::with_capacity(words.len());
    for place in 0..width {
        planes.extend(words[..whole].iter().skip(place).step_by(width));
    }
    planes.extend_from_slice(&words[whole..]);
    planes
}

/// Reverses [`to_planes`].
pub(crate) fn from_planes(width: usize, planes: &[u8]) -> Vec<u8> {
    let count = planes.len() / width;
    let mut words = vec![0; planes.len()];
    for place in 0..width {
        let plane = &planes[place * count..(place + 1) * count];
        words.iter_mut().skip(place).step_by(width).zip(plane).for_each(|(to, from)| *to = *from);
    }
    words[count * width..].copy_from_slice(&planes[count * width..]);
    words
}

/// Number of words of `width` bytes that differ. Bytes beyond the last whole word count as one.
pub(crate) fn changed(width: usize, before: &[u8], after: &[u8]) -> usize {
    let pairs = before.chunks(width).zip(after.chunks(width));
    pairs.filter(|(before, after)| before != after).count()
}

/// The words of `after` that differ from `before`, which has the same length.
pub(crate) fn encode(width: usize, before: &[u8], after: &[u8]) -> Vec<u8> {
    let (mut gaps, mut words, mut count, mut next) = (Vec::new(), Vec::new(), 0, 0);
    for (at, (before, after)) in before.chunks(width).zip(after.chunks(width)).enumerate() {
        if before == after {
            continue;
        }
        put_number(&mut gaps, at - next);
        (next, count) = (at + 1, count + 1);
        words.extend(before.iter().zip(after).map(|(before, after)| before ^ after));
        // The last word may be shorter.
        words.resize(count * width, 0);
    }
    let mut delta = Vec::with_capacity(gaps.len() + words.len() + 8);
    put_number(&mut delta, count);
    delta.extend(gaps);
    delta.extend(to_planes(width, &words));
    delta
}

/// Applies a delta to the bytes that it was made from. An error is a delta that does not fit them,
/// after which the bytes are undefined.
pub(crate) fn apply(width: usize, bytes: &mut [u8], delta: &[u8]) -> Result<(), &'static str> {
    let mut rest = delta;
    let count = take_number(&mut rest)?;
    if count > bytes.len().div_ceil(width) {
        return Err("a delta of more words than there are");
    }
    let mut places = Vec::with_capacity(count);
    let mut next = 0usize;
    for _ in 0..count {
        let at = next.checked_add(take_number(&mut rest)?).ok_or("a delta beyond the end")?;
        places.push(at);
        next = at + 1;
    }
    if rest.len() != count * width {
        return Err("a delta of another length");
    }
    for (word, at) in from_planes(width, rest).chunks(width).zip(places) {
        let place =
            bytes.get_mut(at.saturating_mul(width)..).filter(|place| !place.is_empty()).ok_or("a delta beyond the end")?;
        place.iter_mut().zip(word).for_each(|(byte, bits)| *byte ^= bits);
    }
    Ok(())
}

/// Appends a number in groups of seven bits, the lowest first.
fn put_number(to: &mut Vec<u8>, mut number: usize) {
    while number > 0x7f {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

fn take_number(from: &mut &[u8]) -> Result<usize, &'static str> {
    let mut number = 0;
    for shift in (0..usize::BITS).step_by(7) {
        let (byte, rest) = from.split_first().ok_or("a delta that breaks off")?;
        *from = rest;
        number |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err("a delta with a number that is too large")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_delta_gives_back_every_bit_and_planes_reverse(
            before in prop::collection::vec(any::<u8>(), 0..300), changes in prop::collection::vec((any::<u16>(), any::<u8>()), 0..40),
            width in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            let mut after = before.clone();
            for (at, byte) in changes.into_iter().filter(|_| !before.is_empty()) {
                after[usize::from(at) % before.len()] = byte;
            }
            let delta = encode(width, &before, &after);
            let mut found = before.clone();
            prop_assert_eq!(apply(width, &mut found, &delta), Ok(()));
            prop_assert_eq!(&found, &after);
            prop_assert_eq!(from_planes(width, &to_planes(width, &after)), after.clone());
            prop_assert_eq!(take_number(&mut &delta[..]), Ok(changed(width, &before, &after)));
        }

        #[test]
        fn any_bytes_as_a_delta_are_applied_or_refused_without_a_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..64), delta in prop::collection::vec(any::<u8>(), 0..64),
            width in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            apply(width, &mut bytes, &delta).ok();
        }
    }
}
