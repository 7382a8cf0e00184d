//! A strict parser of the Prometheus text format 0.0.4, written from its description and not from the exporter.

/// A whole scrape.
#[derive(Debug, Default)]
pub struct Exposition {
    pub families: Vec<Family>,
}

/// One metric: its comments and samples.
#[derive(Debug, Default)]
pub struct Family {
    pub name: String,
    pub kind: String,
    pub help: String,
    pub samples: Vec<Sample>,
}

/// One line with a value.
#[derive(Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Exposition {
    /// Reads a scrape; says what is wrong with the first line that breaks the format.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.ends_with('\n') {
            return Err("the last line has no end".into());
        }
        let mut scrape = Exposition::default();
        for (at, line) in text.lines().enumerate() {
            scrape.line(line).map_err(|problem| format!("line {}: {problem}: {line}", at + 1))?;
        }
        Ok(scrape)
    }

    pub fn family(&self, name: &str) -> Option<&Family> {
        self.families.iter().find(|family| family.name == name)
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        if line.is_empty() {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or("no help text")?;
            let family = self.open(name)?;
            family.help = help.replace("\\n", "\n").replace("\\\\", "\\");
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or("no type")?;
            let family = self.open(name)?;
            if !family.kind.is_empty() {
                return Err("a second TYPE".into());
            }
            if !["counter", "gauge", "histogram", "summary", "untyped"].contains(&kind) {
                return Err("an unknown type".into());
            }
            family.kind = kind.into();
            return Ok(());
        }
        if line.starts_with('#') {
            return Ok(());
        }
        let sample = parse_sample(line)?;
        let family = self.families.last_mut().ok_or("a sample before any TYPE")?;
        let suffix = sample.name.strip_prefix(&family.name).ok_or("a sample outside its family's block")?;
        let fits = match family.kind.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
            _ => suffix.is_empty(),
        };
        if !fits {
            return Err(format!("the suffix {suffix:?} does not fit a {}", family.kind));
        }
        if family.samples.iter().any(|known| known.name == sample.name && known.labels == sample.labels) {
            return Err("the same series twice".into());
        }
        family.samples.push(sample);
        Ok(())
    }

    /// The block of `name`, which must be the last one or new.
    fn open(&mut self, name: &str) -> Result<&mut Family, String> {
        let at = self.families.iter().position(|family| family.name == name);
        match at {
            Some(at) if at + 1 < self.families.len() || !self.families[at].samples.is_empty() => {
                Err("a family in two blocks".into())
            }
            Some(at) => Ok(&mut self.families[at]),
            None => {
                self.families.push(Family { name: name.into(), ..Family::default() });
                Ok(self.families.last_mut().expect("just pushed"))
            }
        }
    }
}

impl Family {
    /// The value of the series with exactly these labels.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let same = |sample: &&Sample| {
            sample.name == name
                && sample.labels.len() == labels.len()
                && labels.iter().all(|(key, value)| sample.labels.iter().any(|(k, v)| k == key && v == value))
        };
        self.samples.iter().find(same).map(|sample| sample.value)
    }

    /// Upper bounds and counts of a histogram of which there is one series.
    pub fn buckets(&self, name: &str) -> Vec<(f64, f64)> {
        let bucket = format!("{name}_bucket");
        let bound = |sample: &Sample| number(&sample.labels.iter().find(|(key, _)| key == "le").expect("le").1).expect("a bound");
        self.samples.iter().filter(|sample| sample.name == bucket).map(|sample| (bound(sample), sample.value)).collect()
    }
}

fn parse_sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    let legal =
        |(at, byte): (usize, u8)| byte.is_ascii_alphabetic() || byte == b'_' || byte == b':' || (at > 0 && byte.is_ascii_digit());
    if name.is_empty() || !name.bytes().enumerate().all(legal) {
        return Err("an illegal name".into());
    }
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (key, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            let (value, after) = quoted(after)?;
            labels.push((key.to_owned(), value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: number(value)? })
}

/// A label's value up to its closing quote, with escapes resolved, and what follows it.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, escaped @ ('\\' | '"'))) => value.push(escaped),
                _ => return Err("an unknown escape".into()),
            },
            _ => value.push(char),
        }
    }
    Err("an open quote".into())
}

fn number(text: &str) -> Result<f64, String> {
    match text.to_ascii_lowercase().as_str() {
        "nan" => Ok(f64::NAN),
        "+inf" | "inf" => Ok(f64::INFINITY),
        "-inf" => Ok(f64::NEG_INFINITY),
        digits => digits.parse().map_err(|_| format!("{text:?} is no number")),
    }
}
