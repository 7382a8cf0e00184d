//! `replay`: what a run gave up is tried again (law F6), here prompts without the ground truth that the reward compares with.

use std::fs;
use std::path::Path;

use rollflow::observe::logs::{DEAD_LETTERS, DeadLetter, Rollout, read_lines};

use crate::running::{Ended, GRPO, read, rollflow, rows, run_args, with_sets};

/// Any answer is compared with the ground truth; the first sums have none.
const COMPARED: &str = "reward={kind=\"regex\",pattern=\"(?s)^(.*)$\",require_end_of_text=false,retries=1}";
/// Any answer is right.
const FREE: &str = "reward={kind=\"regex\",pattern=\"^\",require_end_of_text=false}";

/// Runs over eight prompts, of which `poisoned` have no ground truth.
fn run(folder: &Path, poisoned: usize, sets: &[&str]) -> Ended {
    let data = folder.join("prompts.jsonl");
    let answer = |at: usize| if at < poisoned { "" } else { ",\"answer\":\"7\"" };
    let lines: Vec<String> = (0..8).map(|at| format!("{{\"prompt\":\"{at}+1=\"{}}}\n", answer(at))).collect();
    fs::write(&data, lines.concat()).unwrap();
    let task = format!("task={{kind=\"data\",data={:?},shuffle=false}}", data.display().to_string());
    let sets = [&[task.as_str(), COMPARED, "train.steps=3"], sets].concat();
    let out = folder.join("run");
    let args = run_args(GRPO, &out, &sets);
    // The recipe's warm-up needs answers to imitate, and these prompts have none.
    let pairs = folder.join("pairs.jsonl");
    fs::write(&pairs, "{\"prompt\":\"3+4=\",\"completion\":\"7\"}\n").unwrap();
    let pairs = format!("sft.data={}", pairs.display());
    rollflow(&[args, vec!["--set", &pairs]].concat())
}

fn replay(folder: &Path, sets: &[&str]) -> Ended {
    rollflow(&with_sets(&["replay", folder.join("run").to_str().unwrap()], sets))
}

#[test]
fn a_poisoned_run_takes_its_steps_and_its_letters_earn_under_a_mended_reward() {
    let folder = tempfile::tempdir().unwrap();
    let ended = run(folder.path(), 2, &[]).ok();
    assert!(ended.out.contains("rollflow replay"), "{}", ended.out);
    let out = folder.path().join("run");
    let rows = rows(&out);
    assert_eq!(rows.len(), 3, "all steps were taken");
    assert_eq!(rows[0]["poisoned_groups"], 2.0, "the first two prompts lay before the first four that earned");
    assert!(read(&out.join("report.html")).contains("rollflow replay tries them again"));

    let written = read(&out.join(DEAD_LETTERS));
    let letters: Vec<_> = read_lines::<DeadLetter>(out.join(DEAD_LETTERS)).unwrap().map(Result::unwrap).collect();
    assert_eq!((letters[0].stage.as_str(), letters[0].samples.len()), ("reward", 4));
    let first = letters[0].prompt.ordinal;
    let failure = letters[0].failures[0].to_string();
    assert_eq!(failure, "it refused: the prompt has no ground truth, metadata[\"answer\"] (2 attempts)");

    let still = replay(folder.path(), &[]);
    assert_eq!(still.code, Some(1), "{}", still.err);
    assert!(still.out.starts_with(&format!("group {first}: sample 0: {failure}; sample 1: ")), "{}", still.out);
    assert!(still.out.contains(&format!("0 of {} earn now", letters.len())), "{}", still.out);
    assert_eq!(read(&out.join("replayed.jsonl")), "");

    for _ in 0..2 {
        let mended = replay(folder.path(), &[FREE]);
        assert_eq!(mended.code, Some(0), "{}{}", mended.out, mended.err);
        assert!(mended.out.starts_with(&format!("group {first}: earns [1.0, 1.0, 1.0, 1.0]\n")), "{}", mended.out);
        let replayed: Vec<_> = read_lines::<Rollout>(out.join("replayed.jsonl")).unwrap().map(Result::unwrap).collect();
        assert_eq!(replayed.len(), 4 * letters.len(), "each once, however often it is replayed");
        for (rollout, sample) in replayed.iter().zip(letters.iter().flat_map(|letter| &letter.samples)) {
            assert_eq!((rollout.group, rollout.index, rollout.reward), (sample.group_index, sample.index, Some(1.0)));
            assert_eq!((&rollout.tokens, &rollout.versions), (&sample.tokens, &sample.versions), "law D1: as they were sampled");
            assert_eq!(rollout.log_probs.as_ref(), Some(&sample.log_probs));
        }
        assert_eq!(read(&out.join(DEAD_LETTERS)), written, "nothing is taken from the letters");
    }
}

#[test]
fn a_damaged_letter_is_told_by_file_and_line_and_the_others_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run(folder.path(), 2, &[]).code, Some(0));
    let path = folder.path().join("run").join(DEAD_LETTERS);
    let letters = read(&path);
    fs::write(&path, letters.replacen("\"stage\":", "\"stag", 1)).unwrap();
    let replayed = replay(folder.path(), &[FREE]);
    assert_eq!(replayed.code, Some(1));
    assert!(replayed.out.starts_with(&format!("{}, line 1: ", path.display())), "{}", replayed.out);
    assert!(replayed.out.contains("\ngroup "), "{}", replayed.out);

    // A killed run leaves half a line.
    fs::write(&path, format!("{letters}{{\"stage\":")).unwrap();
    let replayed = replay(folder.path(), &[FREE]);
    assert!(replayed.code == Some(0) && replayed.out.contains("is incomplete and is skipped"), "{}", replayed.out);
}

#[test]
fn a_reward_that_fails_on_all_groups_ends_the_run_and_says_where_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let broken = COMPARED.replace("retries=1", "retries=0,max_poisoned=5");
    let ended = run(folder.path(), 8, &[&broken]);
    assert_eq!(ended.code, Some(1));
    for part in ["6 groups in a row", "max_poisoned", "no ground truth", DEAD_LETTERS] {
        assert!(ended.err.contains(part), "{part} is missing: {}", ended.err);
    }
    assert_eq!(read(&folder.path().join("run").join(DEAD_LETTERS)).lines().count(), 6);
}

#[test]
fn a_recipe_says_what_becomes_of_a_poisoned_group() {
    for (word, code, letters) in [("drop", 0, false), ("zero", 0, false), ("fail", 1, false), ("dead_letter", 0, true)] {
        let folder = tempfile::tempdir().unwrap();
        let reward = COMPARED.replace("retries=1", &format!("on_failure=\"{word}\""));
        let ended = run(folder.path(), 2, &[&reward]);
        assert_eq!(ended.code, Some(code), "{word}: {}", ended.err);
        assert_eq!(folder.path().join("run").join(DEAD_LETTERS).exists(), letters, "{word}");
    }
}

#[test]
fn what_is_no_run_or_no_key_of_the_reward_is_refused_and_a_run_without_letters_has_nothing_to_replay() {
    let folder = tempfile::tempdir().unwrap();
    let missing = replay(folder.path(), &[]);
    assert_eq!((missing.code, missing.out.as_str()), (Some(2), ""));
    assert!(missing.err.contains("recipe.toml"), "{}", missing.err);

    assert_eq!(run(folder.path(), 0, &[]).code, Some(0));
    let none = replay(folder.path(), &[]);
    assert_eq!(none.code, Some(0));
    assert!(none.out.starts_with("no dead letters in "), "{}", none.out);
    assert!(!folder.path().join("run/replayed.jsonl").exists());
    for (set, why) in [("train.lr=1", "only keys of [reward]"), ("reward.retires=1", "did you mean `retries`")] {
        let refused = replay(folder.path(), &[set]);
        assert_eq!(refused.code, Some(2), "{}", refused.out);
        assert!(refused.err.contains(why), "{}", refused.err);
    }
}
