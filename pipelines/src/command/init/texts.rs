//! The pieces of the recipe that `init` writes.

pub(super) const OPENING: &str = "\
# A recipe of rollflow. docs/reference/recipe has every key; what is left out has its default. To look at it before it runs: rollflow check
";
pub(super) const TINY: &str = "
# A small random decoder with a character tokenizer, for experiments that take minutes.
[model]
kind = \"tiny\"
";
pub(super) const MODEL: &str = "
# config.json, safetensors and tokenizer.json, as Hugging Face has them: a folder, or an id or preset that the hub's tools have fetched.
[model]
kind = \"folder\"
";
pub(super) const CHAT: &str = "
# Prompts that are plain text become a turn of the model's user where it has a chat template (auto). `system` adds a system turn.
[chat]
";
pub(super) const ARITHMETIC: &str = "
# Sums such as 7+5=, made on the spot.
[task]
kind = \"arithmetic\"
digits = 1
";
pub(super) const DATA: &str = "
# Fields are recognised by their names (docs/how_to/data.md); `columns` says which hold what where they are not.
[task]
";
pub(super) const SFT: &str = "
# Imitates the task's answers.
[sft]
";
pub(super) const SFT_FIRST: &str = "
# Imitates the task's answers first, as a run of its own in the folder `sft` of this one's.
[sft]
";
pub(super) const WARM_UP: &str = "
# A random model is never right: it imitates first, briefly. Remove this for a model that knows something.
[sft]
steps = 25
batch = 64
lr = 1e-3
";
pub(super) const GENERATE: &str = "
# So many answers to a prompt, whose rewards are compared; and how long they may be, in tokens.
[generate]
";
pub(super) const REWARD: &str = "
# What an answer earns.
[reward]
";
pub(super) const FILTER: &str = "
# Groups whose answers all earned the same teach nothing.
[[filter]]
kind = \"nonzero_std\"

# Groups that an optimizer step learns from.
[batch]
";
pub(super) const TRAIN: &str = "
[train]
";
pub(super) const FLOW: &str = "
# Generation may run ahead of training by so many versions; 0 is the synchronous algorithm.
[flow]
max_staleness = 1
";
pub(super) const EVAL: &str = "
# Every so many steps, what the newest weights know: greedy and sampled accuracy, pass@k.
[eval]
every = 50
samples = 4
";
pub(super) const CHECKPOINT: &str = "
[checkpoint]
every = 100
keep = 3
";
