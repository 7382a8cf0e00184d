//! An algorithm by its name and a few values, for code that has no recipe.

use super::checks::{placed, problems_of_training};
use super::reference::sections_with;
use super::train::Train;
use crate::settings::document::{Entry, Node, Value};
use crate::settings::error::{Place, RecipeErrors};
use crate::settings::params::Params;
use crate::settings::renames::Renames;
use crate::settings::section::{Findings, Section};
use crate::settings::setting::Setting;

/// `[train]` with the loss of that name and the given values: keys of `[train]`, or of the loss. A name or a key that does not exist, and a
/// value out of range, is an error that says which there are.
///
/// ```
/// use rollflow::recipe::{Params, create_algorithm_config};
///
/// let train = create_algorithm_config("dapo", &Params::default().with("epsilon_high", 0.3).with("lr", 1e-5)).unwrap();
/// assert_eq!(train.lr, 1e-5);
///
/// let slip = create_algorithm_config("dappo", &Params::default()).unwrap_err().to_string();
/// assert!(slip.contains("did you mean \"dapo\"? it is one of \"grpo\", \"dapo\", "), "{slip}");
/// let slip = create_algorithm_config("grpo", &Params::default().with("epsilom", 0.3)).unwrap_err().to_string();
/// assert!(slip.contains("unknown key `epsilom`") && slip.contains("known keys here: kind, epsilon, epsilon_high"), "{slip}");
/// ```
pub fn create_algorithm_config(name: &str, params: &Params) -> Result<Train, RecipeErrors> {
    let mut keys = Vec::new();
    Train::describe_rows("", &mut keys);
    let renames = Renames::of::<Train>();
    let of_training = |name: &str| {
        let name = renames.path(name);
        keys.iter().any(|key| key.path.split(['.', '[']).next() == Some(&name))
    };
    let (mut train, mut loss): (crate::settings::document::Table, _) =
        params.nodes().into_iter().partition(|(name, _)| of_training(name));
    let entry = |value| Entry { key_place: Place::Code, node: Node { value, place: Place::Code } };
    let mut findings = Findings::of(sections_with);
    renames.apply_to_table("", &mut train, &mut findings.errors);
    renames.apply_to_table("loss", &mut loss, &mut findings.errors);
    loss.insert("kind".to_owned(), entry(Value::Text(name.to_owned())));
    train.insert("loss".to_owned(), entry(Value::Table(loss)));
    let train = Train::read(&entry(Value::Table(train)).node, "train", &mut findings).unwrap_or_default();
    let later = placed(problems_of_training(&train), &findings);
    findings.errors.extend(later);
    RecipeErrors::unless_empty(findings.errors).map(|()| train)
}
