//! A small reader of TensorBoard event files, written from the formats' descriptions: TFRecord frames, protobuf wire format.

/// One decoded `Event`.
#[derive(Debug, Default)]
pub struct Event {
    pub wall_time: f64,
    pub step: i64,
    pub file_version: Option<String>,
    /// The status of a session log; 1 is START.
    pub session: Option<u64>,
    pub scalars: Vec<(String, f32)>,
}

/// Reads all frames; a wrong checksum or a torn frame is an error.
pub fn read_events(mut bytes: &[u8]) -> Result<Vec<Event>, String> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let length_bytes = take(&mut bytes, 8)?;
        check(length_bytes, &mut bytes)?;
        let length = u64::from_le_bytes(length_bytes.try_into().map_err(|_| "a length")?);
        let event = take(&mut bytes, length as usize)?;
        check(event, &mut bytes)?;
        events.push(decode_event(event)?);
    }
    Ok(events)
}

fn decode_event(bytes: &[u8]) -> Result<Event, String> {
    let mut event = Event::default();
    for (number, field) in fields(bytes)? {
        match (number, field) {
            (1, Field::Eight(bytes)) => event.wall_time = f64::from_le_bytes(bytes),
            (2, Field::Varint(step)) => event.step = step as i64,
            (3, Field::Bytes(text)) => event.file_version = Some(String::from_utf8_lossy(text).into_owned()),
            (5, Field::Bytes(summary)) => {
                for (number, value) in fields(summary)? {
                    let (1, Field::Bytes(value)) = (number, value) else { return Err("a summary holds values".into()) };
                    event.scalars.push(decode_value(value)?);
                }
            }
            (7, Field::Bytes(log)) => match fields(log)?[..] {
                [(1, Field::Varint(status))] => event.session = Some(status),
                ref other => return Err(format!("a session log has a status, not {other:?}")),
            },
            (number, field) => return Err(format!("an event has no field {number} of kind {field:?}")),
        }
    }
    Ok(event)
}

fn decode_value(bytes: &[u8]) -> Result<(String, f32), String> {
    let (mut tag, mut scalar) = (None, None);
    for (number, field) in fields(bytes)? {
        match (number, field) {
            (1, Field::Bytes(text)) => tag = Some(String::from_utf8_lossy(text).into_owned()),
            (2, Field::Four(bytes)) => scalar = Some(f32::from_le_bytes(bytes)),
            (number, field) => return Err(format!("a value has no field {number} of kind {field:?}")),
        }
    }
    tag.zip(scalar).ok_or("a value without tag or number".into())
}

#[derive(Debug)]
enum Field<'a> {
    Varint(u64),
    Eight([u8; 8]),
    Bytes(&'a [u8]),
    Four([u8; 4]),
}

fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Field<'_>)>, String> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let field = match key & 7 {
            0 => Field::Varint(varint(&mut bytes)?),
            1 => Field::Eight(take(&mut bytes, 8)?.try_into().map_err(|_| "eight bytes")?),
            2 => {
                let length = varint(&mut bytes)? as usize;
                Field::Bytes(take(&mut bytes, length)?)
            }
            5 => Field::Four(take(&mut bytes, 4)?.try_into().map_err(|_| "four bytes")?),
            wire => return Err(format!("wire type {wire}")),
        };
        fields.push((key >> 3, field));
    }
    Ok(fields)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a varint of more than ten bytes".into())
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (taken, rest) = bytes.split_at_checked(count).ok_or("the file ends in the middle")?;
    *bytes = rest;
    Ok(taken)
}

/// Compares the next four bytes with the masked CRC-32C of `data`, by table where the writer goes bit by bit.
fn check(data: &[u8], bytes: &mut &[u8]) -> Result<(), String> {
    let table: Vec<u32> = (0..256_u32)
        .map(|byte| (0..8).fold(byte, |crc, _| if crc % 2 == 1 { 0x82f6_3b78 ^ (crc / 2) } else { crc / 2 }))
        .collect();
    let crc = !data.iter().fold(u32::MAX, |crc, byte| table[((crc as u8) ^ byte) as usize] ^ (crc >> 8));
    let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
    let written = u32::from_le_bytes(take(bytes, 4)?.try_into().map_err(|_| "a checksum")?);
    if written == masked { Ok(()) } else { Err("a wrong checksum".into()) }
}
