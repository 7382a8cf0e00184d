//! A sample as a page, and two samples side by side.

use serde_json::Value;

use crate::data::Sample;

/// A sample as text: what was asked and answered, what it earned, and a line for every token with its weight, log-probability and
/// version. For people; nothing reads it again.
pub fn inspect_sample(sample: &Sample) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    let mut page = format!("sample {} of group {} ({:?})\n", sample.index, sample.group_index, sample.status);
    page += &format!("  prompt     {:?}\n", sample.prompt.render());
    page += &format!("  response   {:?}\n", sample.response);
    page += &format!("  reward     {}\n", number(sample.reward));
    for (name, value) in &sample.reward_parts {
        page += &format!("    {name} {value}\n");
    }
    page += &format!("  advantage  {}\n", number(sample.advantage));
    page +=
        &format!("  tokens     {}: {} sampled, {} trained\n", sample.tokens.len(), sample.generated(), sample.response_length());
    page += "  place    token  weight  log-prob  version\n";
    let mut versions = sample.versions.per_token();
    for (at, token) in sample.tokens.iter().enumerate() {
        let column =
            |values: &[f32], digits: usize| values.get(at).map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
        let version = versions.next().flatten().map_or_else(|| "-".to_owned(), |version| version.to_string());
        page += &format!(
            "  {at:>5} {token:>8} {:>7} {:>9} {version:>8}\n",
            column(&sample.loss_mask, 2),
            column(&sample.log_probs, 4)
        );
    }
    page
}

/// Where two samples differ: a line for each field, and the first place in lists. Empty where they are the same.
pub fn compare_samples(one: &Sample, other: &Sample) -> Vec<String> {
    let fields = |sample: &Sample| serde_json::to_value(sample).expect("a sample has string keys and finite or named numbers");
    let (Value::Object(one), Value::Object(other)) = (fields(one), fields(other)) else { return Vec::new() };
    let absent = Value::Null;
    let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let values = |name: &String| (one.get(name).unwrap_or(&absent).clone(), other.get(name).unwrap_or(&absent).clone());
    names.into_iter().filter_map(|name| difference(name, &values(name))).collect()
}

fn difference(name: &str, values: &(Value, Value)) -> Option<String> {
    match values {
        (one, other) if one == other => None,
        (Value::Array(one), Value::Array(other)) => {
            let lengths =
                if one.len() == other.len() { String::new() } else { format!(" ({} and {} entries)", one.len(), other.len()) };
            let at = one.iter().zip(other).position(|(one, other)| one != other);
            Some(match at {
                Some(at) => format!("{name}[{at}]: {} and {}{lengths}", one[at], other[at]),
                None => format!("{name}: the longer goes on where the other ends{lengths}"),
            })
        }
        (one, other) => Some(format!("{name}: {one} and {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::rollouts::mock_sample;

    #[test]
    fn a_page_has_a_line_for_every_token() {
        let mut sample = Sample::begin(&"3+4=".into(), 1, &[5, 6]);
        sample.push(7, -0.25, 3);
        sample.reward = Some(1.0);
        sample.reward_parts.insert("form".to_owned(), 0.5);
        let page = inspect_sample(&sample);
        let lines: Vec<&str> = page.lines().collect();
        assert_eq!(lines[0], "sample 1 of group 0 (Pending)");
        assert_eq!(lines[4], "    form 0.5");
        assert_eq!(lines[6], "  tokens     3: 1 sampled, 1 trained");
        assert_eq!(
            lines[8..],
            [
                "      0        5    0.00    0.0000        -",
                "      1        6    0.00    0.0000        -",
                "      2        7    1.00   -0.2500        3"
            ]
        );
    }

    #[test]
    fn what_differs_is_named_by_field_and_place() {
        let one = mock_sample(0, 0, 5);
        assert_eq!(compare_samples(&one, &one.clone()), [""; 0]);
        let mut other = Sample { reward: None, response: "else".to_owned(), ..one.clone() };
        let last = other.tokens.len() - 1;
        other.tokens[last] += 1;
        other.loss_mask.push(1.0);
        let told = compare_samples(&one, &other);
        let tokens = format!("tokens[{last}]: {} and {}", one.tokens[last], one.tokens[last] + 1);
        let mask = format!("loss_mask: the longer goes on where the other ends ({} and {} entries)", last + 1, last + 2);
        assert!(told.contains(&tokens) && told.contains(&mask), "{told:?}");
        assert_eq!(told.len(), 4, "{told:?}");
    }
}
