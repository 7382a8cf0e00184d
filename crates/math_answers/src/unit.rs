//! Units and their common spellings.

/// Common name, and other spellings in lower case, without plurals in `s` and `es`.
const UNITS: [(&str, &[&str]); 48] = [
    ("cm", &["centimeter", "centimetre"]),
    ("mm", &["millimeter", "millimetre"]),
    ("m", &["meter", "metre"]),
    ("km", &["kilometer", "kilometre"]),
    ("in", &["inch", "inche"]),
    ("ft", &["foot", "feet"]),
    ("yd", &["yard"]),
    ("mi", &["mile"]),
    ("cm^2", &["sq cm", "square centimeter", "square centimetre", "cm2", "square cm"]),
    ("m^2", &["sq m", "square meter", "square metre", "m2", "square m"]),
    ("km^2", &["sq km", "square kilometer", "square kilometre"]),
    ("in^2", &["sq in", "square inch", "square inche"]),
    ("ft^2", &["sq ft", "square foot", "square feet"]),
    ("cm^3", &["cubic centimeter", "cubic centimetre", "cc", "cubic cm"]),
    ("m^3", &["cubic meter", "cubic metre"]),
    ("in^3", &["cubic inch", "cubic inche"]),
    ("ft^3", &["cubic foot", "cubic feet"]),
    ("unit", &["square unit", "cubic unit", "sq unit", "unit^2", "unit^3"]),
    ("g", &["gram"]),
    ("mg", &["milligram"]),
    ("kg", &["kilogram"]),
    ("lb", &["pound"]),
    ("oz", &["ounce"]),
    ("ton", &["tonne"]),
    ("l", &["liter", "litre"]),
    ("ml", &["milliliter", "millilitre"]),
    ("gal", &["gallon"]),
    ("s", &["sec", "second"]),
    ("min", &["minute"]),
    ("h", &["hr", "hour"]),
    ("day", &[]),
    ("week", &[]),
    ("month", &[]),
    ("year", &["yr"]),
    ("mph", &["mile per hour", "miles per hour", "mi/h"]),
    ("km/h", &["kph", "kmh", "kilometer per hour", "kilometers per hour", "kilometres per hour"]),
    ("m/s", &["meter per second", "meters per second", "metres per second"]),
    ("dollar", &["usd", "buck"]),
    ("cent", &[]),
    ("euro", &["eur"]),
    ("°", &["degree", "deg"]),
    ("rad", &["radian"]),
    ("%", &["percent", "percentage"]),
    ("hz", &["hertz"]),
    ("j", &["joule"]),
    ("n", &["newton"]),
    ("w", &["watt"]),
    ("v", &["volt"]),
];

/// Returns the common name of a unit; none for other words.
pub(crate) fn unit(words: &str) -> Option<&'static str> {
    let lower = words.trim().trim_end_matches('.').to_lowercase();
    let lower = lower.split_whitespace().collect::<Vec<_>>().join(" ");
    let find =
        |name: &str| UNITS.iter().find(|(common, names)| *common == name || names.contains(&name)).map(|(common, _)| *common);
    find(&lower).or_else(|| lower.strip_suffix('s').and_then(find)).or_else(|| lower.strip_suffix("es").and_then(find))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_has_one_name_and_other_words_have_none() {
        assert_eq!((unit("centimeters"), unit(" cm. "), unit("sq  cm")), (Some("cm"), Some("cm"), Some("cm^2")));
        assert_eq!((unit("Inches"), unit("degrees"), unit("miles per hour")), (Some("in"), Some("°"), Some("mph")));
        assert_eq!((unit("apples"), unit("")), (None, None));
    }
}
