//! A sample as text.

use crate::data::Sample;

/// A sample as text: prompt, response, rewards, and a line for every token with its mask,
/// log-probability and version.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
