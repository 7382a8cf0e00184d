//! A TOML file of settings that are no recipe, such as `[deploy]`, under overrides of the command line.

use std::path::Path;

use rollflow::recipe::{Place, Problem, RecipeErrors};
use rollflow::util::reading;
use rollflow_settings::document;
use rollflow_settings::renames::Renames;
use rollflow_settings::section::{Findings, Section};
use rollflow_settings::setting::Setting;

/// Reads `section` from `file`, if there is one, under the overrides `sets`, such as
/// `deploy.ranks=4`. `further` looks for values that contradict each other. Reports every error with
/// its place.
pub fn read<File: Section>(
    section: &str,
    file: Option<&Path>,
    sets: &[String],
    further: impl Fn(&File) -> Vec<Problem>,
) -> Result<File, RecipeErrors> {
    let name = file.map_or_else(|| "--set".to_owned(), |file| file.display().to_string());
    let text = file.map_or_else(|| Ok(String::new()), reading::read_text).map_err(|error| {
        let help = format!("give the path of a TOML file with a section [{section}]");
        let problem = Problem::of("", format!("cannot read {name}: {error}"), help);
        RecipeErrors::of(vec![problem.at(Place::File { file: name.clone(), line: 1, column: 1 })])
    })?;
    let root = document::parse::<File>(&name, &text, sets, &Renames::of::<File>(), |_| &[]).map_err(RecipeErrors::of)?;
    let mut findings = Findings::default();
    let read = File::read(&root, "", &mut findings).unwrap_or_default();
    let mut problems = Vec::new();
    read.check("", &mut problems);
    problems.extend(further(&read));
    let placed = problems.into_iter().map(|problem| {
        let place = findings.place([problem.key.as_str()]).cloned().unwrap_or(Place::Code);
        problem.at(place)
    });
    let all = placed.collect::<Vec<_>>().into_iter().chain(findings.errors).collect();
    RecipeErrors::unless_empty(all).map(|()| read)
}

/// Rows of a page that lists the keys of a file: `| key | takes | default | meaning |`.
#[cfg(test)]
pub fn reference<File: Section>() -> String {
    let mut rows = Vec::new();
    File::keys().rows("", &mut rows);
    let row =
        |key: &rollflow_settings::keys::KeyDoc| format!("| `{}` | {} | {} | {} |\n", key.path, key.expects, key.default, key.doc);
    "| key | takes | default | meaning |\n| --- | --- | --- | --- |\n".to_owned() + &rows.iter().map(row).collect::<String>()
}
