//! Experts of tokens on the wire, as SGLang writes them: i32 of `[tokens, layers, experts per token]`,
//! little-endian, in base64.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use crate::data::{ANY_EXPERT, RouteShape, Routes};

/// As a server writes them.
#[cfg(any(feature = "torch", test))]
pub fn write(routes: &Routes) -> String {
    let number = |expert: &u16| if *expert == ANY_EXPERT { -1 } else { i32::from(*expert) };
    BASE64_STANDARD.encode(routes.experts.iter().flat_map(|expert| number(expert).to_le_bytes()).collect::<Vec<u8>>())
}

/// Those of a sequence of so many tokens, of which the last has none. A negative number is an expert that is
/// not known.
///
/// # Errors
/// What is wrong with them.
pub(super) fn read(text: &str, RouteShape { layers, per_token }: RouteShape, tokens: usize) -> Result<Routes, String> {
    let bytes = BASE64_STANDARD.decode(text).map_err(|error| format!("experts that are not base64: {error}"))?;
    let expected = 4 * tokens.saturating_sub(1) * layers * per_token;
    if bytes.len() != expected {
        let sizes = format!("{tokens} tokens but the last, {layers} sparse layers, {per_token} experts a token and 4 bytes each");
        return Err(format!("experts in {} bytes, where {sizes} are {expected}", bytes.len()));
    }
    let number = |bytes: &[u8]| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let expert = |number: i32| match u16::try_from(number) {
        Ok(expert) if expert != ANY_EXPERT => Ok(expert),
        Err(_) if number < 0 => Ok(ANY_EXPERT),
        _ => Err(format!("expert {number}")),
    };
    let experts = bytes.chunks_exact(4).map(|bytes| expert(number(bytes))).collect::<Result<_, _>>()?;
    Ok(Routes { layers, per_token, experts })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RouteShape = RouteShape { layers: 2, per_token: 2 };

    #[test]
    fn experts_are_read_as_they_were_written_and_others_are_refused() {
        let routes = Routes { layers: 2, per_token: 2, experts: vec![0, 1, 300, ANY_EXPERT, 7, 8, 9, 65_534] };
        let text = write(&routes);
        // numpy.array([...], dtype="<i4") in base64.
        assert!(text.starts_with("AAAAAAEAAAAsAQAA/////w"), "{text}");
        assert_eq!(read(&text, SHAPE, 3).unwrap(), routes);
        assert_eq!(read("", SHAPE, 1).unwrap().experts, Vec::<u16>::new());
        let beyond = BASE64_STANDARD.encode([65_535i32, 0, 0, 0].map(i32::to_le_bytes).concat());
        for (text, tokens, why) in [
            (&*text, 4, "experts in 32 bytes, where 4 tokens but the last, 2 sparse layers"),
            ("AAA=A", 3, "not base64"),
            ("AAAA", 3, "3 bytes"),
            (&beyond, 2, "expert 65535"),
        ] {
            let found = read(text, SHAPE, tokens).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
    }
}
