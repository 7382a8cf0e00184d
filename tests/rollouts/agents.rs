//! Rollouts of several turns: D1 and D3 (what was sampled is kept exactly, and only it is trained), D2 (parts of a rollout are compared as one),
//! F6 (an environment that fails or hangs costs its own rollout).

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::environments::CalculatorEnvironment;
use crate::speaker::Speaker;
use rollflow::algo::rewards::math_reward;
use rollflow::data::chat::ChatTemplate;
use rollflow::data::{ChatMessage, Spans};
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Room, Step, ToolFormat, ToolSpec, Toolbox};
use rollflow::prelude::*;
use rollflow::rollout::{Agent, agent_rollout_to_sample, create_multiturn_rollout, generate_conversation_turn, roll_out};
use rollflow::stages::reward::score;
use rollflow::train::assign_advantages;
use serde_json::json;

const LETTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n_";

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::characters(LETTERS, 64).unwrap())
}

fn params(max_new_tokens: usize) -> SamplingParams {
    SamplingParams { max_new_tokens, ..SamplingParams::default() }
}

fn sum() -> Prompt {
    let mut prompt = Prompt::from("3+4=");
    prompt.metadata.insert("answer".into(), "7".into());
    prompt
}

fn calculator() -> Agent {
    Agent::new(CalculatorEnvironment::default).parser(ToolFormat::Xml)
}

/// Uses the calculator, and then says what it gave.
fn capable(read: &str, _: u32) -> String {
    match read.rsplit_once("tool: ") {
        None => "<calculator>3+4</calculator>".into(),
        Some((_, result)) => format!("<complete_task>{}</complete_task>", result.lines().next().unwrap_or_default()),
    }
}

fn one(says: impl Fn(&str, u32) -> String + Send + Sync + 'static, agent: &Agent, max_new_tokens: usize) -> Sample {
    let tokenizer = tokenizer();
    let params = params(max_new_tokens);
    agent_rollout_to_sample(&mut Speaker::new(&tokenizer, says), &tokenizer, Some(agent), sum(), &params).unwrap()
}

#[test]
fn d1_d3_a_rollout_is_what_was_read_and_sampled_and_only_the_model_is_trained() {
    let sample = one(capable, &calculator(), 64);
    sample.validate().unwrap();
    let tokenizer = tokenizer();
    let read = tokenizer.decode_all(&sample.tokens).unwrap();
    let turns = ["<calculator>3+4</calculator><eos>", "<complete_task>7</complete_task><eos>"];
    assert_eq!(read, format!("user: 3+4=\nassistant: {}\ntool: 7\nassistant: {}", turns[0], turns[1]));
    let trained: Vec<u32> =
        sample.tokens.iter().zip(&sample.loss_mask).filter(|(_, mask)| **mask > 0.0).map(|(token, _)| *token).collect();
    assert_eq!(tokenizer.decode_all(&trained).unwrap(), turns.concat());
    for ((mask, log_prob), version) in sample.loss_mask.iter().zip(&sample.log_probs).zip(sample.versions.per_token()) {
        let expected = if version.is_some() { (1.0, -0.5, Some(1)) } else { (0.0, 0.0, None) };
        assert_eq!((*mask, *log_prob, version), expected);
    }
    let told = |key: &str| sample.metadata[key].clone();
    assert_eq!((told("correct"), told("environment_reward"), told("turns")), (json!(true), json!(1.0), json!(2)));
    assert_eq!((told("stop_reason"), sample.status), (json!("environment_done"), Status::Completed));
    assert_eq!(told("tool_calls")["types"], json!({"calculator": 1, "complete_task": 1}));
}

#[test]
fn malformed_calls_are_told_to_the_model_in_the_place_of_their_results() {
    let says = |read: &str, _: u32| match read.matches("assistant: ").count() {
        1 => "<calculator>1</calculator><calculator>2+<calculator>".into(),
        _ => "<complete_task>1</complete_task>".into(),
    };
    let sample = one(says, &calculator(), 80);
    let told: Vec<ChatMessage> = serde_json::from_value(sample.metadata["conversation"].clone()).unwrap();
    let tools: Vec<&str> = told.iter().filter(|turn| turn.role == "tool").map(|turn| turn.content.as_str()).collect();
    assert!(tools[0] == "1" && tools[1].starts_with("error: a call begins with <calculator>"), "{tools:?}");
    assert_eq!(sample.metadata["tool_calls"]["malformed"], 1);
}

#[test]
fn a_reward_of_a_final_answer_does_not_see_what_a_tool_returned() {
    let unsure =
        |read: &str, _: u32| if read.contains("tool: ") { "no idea".into() } else { "<calculator>3+4</calculator>".into() };
    let sample = one(unsure, &calculator(), 64);
    assert_eq!((sample.last_turn(), math_reward()(&sample)), ("no idea", Ok(0.0)));
    assert!(sample.response.contains("tool: 7"), "the stored completion is whole: {}", sample.response);
    let sample = one(capable, &calculator(), 64);
    assert_eq!((sample.last_turn(), math_reward()(&sample)), ("<complete_task>7</complete_task>", Ok(1.0)));
    let sample = one(|_, _| "7".into(), &calculator(), 64);
    assert_eq!((sample.last_turn(), math_reward()(&sample)), ("7", Ok(1.0)), "a rollout of one turn is its completion");
}

#[test]
fn every_limit_ends_a_rollout_and_says_so() {
    let asks = |_: &str, _: u32| "<calculator>1</calculator>".to_owned();
    let stopped = |agent: Agent, room: usize| {
        let sample = one(asks, &agent, room);
        (sample.metadata["stop_reason"].as_str().unwrap().to_owned(), sample.metadata["turns"].as_u64().unwrap(), sample.status)
    };
    let truncated = |reason: &str, turns| (reason.to_owned(), turns, Status::Truncated);
    assert_eq!(stopped(calculator().limits(|of| of.max_turns = 3), 64), truncated("max_turns", 3));
    assert_eq!(stopped(calculator().limits(|of| of.max_tool_calls = Some(2)), 64), truncated("max_tool_calls", 2));
    assert_eq!(stopped(calculator().limits(|of| of.max_tokens = Some(140)), 64), truncated("max_tokens", 2));
    assert_eq!(stopped(calculator(), 5), truncated("max_tokens", 1));
    assert_eq!(stopped(calculator().limits(|of| of.max_time = Some(0.0)), 64), truncated("max_time", 0));
    let twice = |turns: &[ChatMessage]| turns.iter().filter(|turn| turn.role == "tool").count() == 2;
    assert_eq!(stopped(calculator().stop_condition(twice), 64), ("stop_condition".into(), 2, Status::Completed));
    let sample = one(|_, _| "no idea".into(), &calculator(), 64);
    assert_eq!((sample.metadata["stop_reason"].clone(), sample.metadata["correct"].clone()), (json!("answered"), json!(false)));
}

#[test]
fn hooks_see_every_turn_with_what_came_of_it() {
    let seen: Arc<Mutex<Vec<(usize, usize, serde_json::Value)>>> = Arc::default();
    let look = seen.clone();
    let agent = calculator().each_turn(move |turn| {
        look.lock().unwrap().push((turn.turn, turn.calls.len(), turn.observed["answer"].clone()));
    });
    one(capable, &agent, 64);
    assert_eq!(*seen.lock().unwrap(), [(1, 1, json!(null)), (2, 1, json!("7"))]);
}

/// Notes the text that it is given while a turn is sampled.
struct Listener(Arc<Mutex<Vec<String>>>);

impl Environment for Listener {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        Ok(episode.conversation())
    }

    fn step(&mut self, _: &Action, _: Instant) -> Result<Step, EnvError> {
        Ok(Step::over())
    }

    fn listens(&self) -> bool {
        true
    }

    fn hear(&mut self, so_far: &str) {
        self.0.lock().unwrap().push(so_far.to_owned());
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::default())
    }
}

#[test]
fn a_turn_is_streamed_by_whole_characters_though_their_bytes_are_tokens() {
    let tokenizer = Tokenizer::from_dir(Path::new("tests/golden/models/qwen2_tied")).unwrap();
    let (tokenizer, said) = (Arc::new(tokenizer.with_chat(ChatTemplate::plain())), "  né, 中文 → ok\n");
    let heard: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = heard.clone();
    let agent = Agent::new(move || Listener(noted.clone()));
    let mut engine = Speaker::new(&tokenizer, move |_, _| said.to_owned());
    let sample = agent_rollout_to_sample(&mut engine, &tokenizer, Some(&agent), sum(), &params(64)).unwrap();
    let heard = heard.lock().unwrap();
    let grows = |pair: &[String]| pair[1].len() > pair[0].len() && pair[1].starts_with(&pair[0]);
    assert!(heard.windows(2).all(grows) && heard.iter().all(|text| said.starts_with(text.as_str())), "{heard:?}");
    assert_eq!((heard.last().unwrap().as_str(), sample.metadata["stop_reason"].as_str()), (said, Some("environment_done")));
    assert!(heard.len() + 1 < sample.generated(), "some characters have several tokens");
}

/// Hangs, panics or errs for some rollouts.
#[derive(Default)]
struct Faulty(u32);

impl Environment for Faulty {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        self.0 = episode.index;
        Ok(episode.conversation())
    }

    fn step(&mut self, _: &Action, _: Instant) -> Result<Step, EnvError> {
        match self.0 {
            0 => std::thread::sleep(Duration::from_secs(3600)),
            1 => panic!("the map is missing"),
            2 => return Err(EnvError::new("the server went away")),
            _ => {}
        }
        Ok(Step::over().reward(0.25))
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade { reward: 0.5, ..Grade::default() })
    }
}

#[test]
fn f6_an_environment_that_panics_or_errs_costs_its_own_rollout_and_one_that_hangs_in_a_step_ends_it() {
    let (tokenizer, agent) = (tokenizer(), Agent::new(Faulty::default).limits(|of| (of.step_timeout, of.workers) = (5.0, 1)));
    let mut engine = Speaker::new(&tokenizer, |_, _| "go".into());
    let groups = roll_out(&mut engine, &tokenizer, Some(&agent), vec![sum()], 4, &params(8)).unwrap();
    let told = |index: usize, key: &str| groups[0].samples[index].metadata.get(key).cloned().unwrap_or_default();
    assert_eq!((told(0, "stop_reason"), told(0, "environment_reward")), (json!("step_timeout"), json!(0.0)), "that is a verdict");
    assert_eq!(groups[0].samples[0].status, Status::Truncated);
    for (index, why) in [(1, "the map is missing"), (2, "the server went away")] {
        assert_eq!(told(index, "stop_reason"), "environment_failed");
        assert_eq!(groups[0].samples[index].status, Status::Aborted);
        assert!(told(index, "environment_failure").as_str().unwrap().contains(why), "{}", told(index, "environment_failure"));
        assert_eq!(told(index, "environment_reward"), json!(null), "nobody graded it");
    }
    assert_eq!((told(3, "environment_reward"), told(3, "turn_rewards")), (json!(0.75), json!([0.25])));
}

/// Waits for its turn before each call, and takes note of when that came and of whether it lasts.
#[derive(Default)]
struct Sharing {
    began: Option<Instant>,
    turn: Weak<()>,
}

impl Sharing {
    fn judge(&self, deadline: Instant) -> Result<(), EnvError> {
        let has_all_its_time = self.began.is_some_and(|began| deadline - began >= Duration::from_secs(60));
        if has_all_its_time && self.turn.strong_count() == 1 { Ok(()) } else { Err(EnvError::new("it waited in vain")) }
    }
}

impl Environment for Sharing {
    fn room(&mut self) -> Result<Room, EnvError> {
        let turn = Arc::new(());
        (self.began, self.turn) = (Some(Instant::now()), Arc::downgrade(&turn));
        Ok(Box::new(turn))
    }

    fn reset(&mut self, episode: &Episode, deadline: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        self.judge(deadline).map(|()| episode.conversation())
    }

    fn step(&mut self, _: &Action, deadline: Instant) -> Result<Step, EnvError> {
        self.judge(deadline).map(|()| Step::over())
    }

    fn grade(&mut self, deadline: Instant) -> Result<Grade, EnvError> {
        self.judge(deadline).map(|()| Grade::correct(true))
    }
}

#[test]
fn the_time_of_a_call_begins_when_its_environment_has_room_for_it_which_it_keeps_to_the_end() {
    let agent = Agent::new(Sharing::default).limits(|of| (of.step_timeout, of.replays) = (60.0, 0));
    let sample = one(|_, _| "go".into(), &agent, 8);
    assert_eq!(sample.metadata["correct"], json!(true), "{:?}", sample.metadata);
}

/// Takes three turns, and breaks in its own way at the given turn of its first lives.
struct Brittle {
    lives: Arc<AtomicU32>,
    breaks: (u32, usize),
    panics: bool,
    turns: usize,
    broken: bool,
}

impl Environment for Brittle {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        self.broken = self.lives.fetch_add(1, SeqCst) < self.breaks.0;
        if self.broken && self.breaks.1 == 0 {
            return Err(EnvError::new("no machine is free"));
        }
        Ok(episode.conversation())
    }

    fn step(&mut self, _: &Action, _: Instant) -> Result<Step, EnvError> {
        self.turns += 1;
        if self.broken && self.turns == self.breaks.1 {
            assert!(!self.panics, "the map is missing");
            return Err(EnvError::new("the connection is gone"));
        }
        Ok(if self.turns == 3 { Step::over() } else { Step::says(format!("and {}?", self.turns)) }.reward(0.25))
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        match self.broken && self.breaks.1 == 4 {
            true => Err(EnvError::new("the connection is gone")),
            false => Ok(Grade { reward: 0.5, ..Grade::default() }),
        }
    }
}

/// A rollout whose environment breaks so often at a turn (0: the reset, 4: the grading), and how many turns were sampled for it.
fn brittle(breaks: (u32, usize), panics: bool, retries: u32) -> (Sample, usize) {
    let (tokenizer, lives, said): (_, Arc<AtomicU32>, Arc<AtomicUsize>) = (tokenizer(), Arc::default(), Arc::default());
    let make = move || Brittle { lives: lives.clone(), breaks, panics, turns: 0, broken: false };
    let (agent, counted) = (Agent::new(make).limits(|of| of.replays = retries), said.clone());
    let says = move |_: &str, _: u32| format!("turn {}", counted.fetch_add(1, SeqCst));
    let mut engine = Speaker::new(&tokenizer, says);
    let sample = agent_rollout_to_sample(&mut engine, &tokenizer, Some(&agent), sum(), &params(12)).unwrap();
    (sample, said.load(SeqCst))
}

#[test]
fn a_rollout_whose_environment_fails_is_played_again_in_another_and_samples_nothing_twice() {
    let (whole, _) = brittle((0, 0), false, 0);
    assert_eq!(whole.metadata["turns"], 3);
    for at in 0..=4 {
        for panics in [false, true] {
            let (sample, said) = brittle((2, at), panics, 2);
            assert_eq!((&sample.tokens, &sample.status, said), (&whole.tokens, &Status::Completed, 3), "it broke at {at}");
            let of = |sample: &Sample| {
                ["turns", "stop_reason", "environment_reward", "conversation"].map(|key| sample.metadata[key].clone())
            };
            assert_eq!(of(&sample), of(&whole));
        }
    }
    let (lost, said) = brittle((3, 2), false, 2);
    assert_eq!((lost.status, &lost.metadata["stop_reason"], said), (Status::Aborted, &json!("environment_failed"), 2));
    assert_eq!(rollflow::rollout::why_lost(&lost), Some("the connection is gone"));
}

#[test]
fn d2_r248_where_a_template_rewrites_turns_each_part_is_trained_and_the_rollout_compared_once() {
    let source = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and not loop.last %}{{ m.content.split('!')[-1] }}\
                  {% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    let tokenizer = (*tokenizer()).clone().with_chat(ChatTemplate::new(source).unwrap());
    let tokenizer = Arc::new(tokenizer);
    // The second rollout thinks aloud, which the template forgets.
    let says = |read: &str, index: u32| format!("{}{}", if index == 1 { "hm! " } else { "" }, capable(read, index));
    let agent = calculator();
    let mut engine = Speaker::new(&tokenizer, says);
    let groups = roll_out(&mut engine, &tokenizer, Some(&agent), vec![sum()], 2, &params(64)).unwrap();
    let places: Vec<_> = groups[0].samples.iter().map(|sample| (sample.index, sample.part)).collect();
    assert_eq!(places, [(0, 0), (1, 0), (1, 1)]);
    let [_, first, second] = &groups[0].samples[..] else { panic!() };
    let read = |sample: &Sample| tokenizer.decode_all(&sample.tokens).unwrap();
    assert_eq!(read(first), "user: 3+4=\nassistant: hm! <calculator>3+4</calculator><eos>");
    let again = "user: 3+4=\nassistant:  <calculator>3+4</calculator>\ntool: 7\nassistant: ";
    assert_eq!(read(second), format!("{again}hm! <complete_task>7</complete_task><eos>"));
    assert_eq!(second.generated(), "hm! <complete_task>7</complete_task>".len() + 1);
    assert_eq!(first.metadata["correct"], second.metadata["correct"]);

    let mut batch = Batch { groups, ..Batch::default() };
    // Whatever judges answers sees the end of each rollout, and its parts earn the same.
    let judge = |sample: &Sample| {
        assert!(sample.response.contains("complete_task"), "{}", sample.response);
        f64::from(sample.index)
    };
    assert_eq!(score(&mut batch.groups[0], judge, 0, false), []);
    let earned: Vec<_> = batch.samples().map(|sample| (sample.index, sample.part, sample.reward)).collect();
    assert_eq!(earned, [(0, 0, Some(0.0)), (1, 0, Some(1.0)), (1, 1, Some(1.0))]);
    assign_advantages(&mut batch, &GroupMean::default()).unwrap();
    let advantages: Vec<f64> = batch.samples().map(|sample| sample.advantage.unwrap()).collect();
    assert!((advantages[0] + advantages[1]).abs() < 1e-9, "two rollouts are compared, not three samples: {advantages:?}");
    assert_eq!(advantages[1], advantages[2], "parts of a rollout share what comes of that");
}

#[test]
fn turns_and_tool_conversations_can_be_made_by_hand() {
    let tokenizer = tokenizer();
    let mut engine = Speaker::new(&tokenizer, |read, _| if read.contains("tool: ") { "DB".into() } else { "<up>a</up>".into() });
    let asked = vec![ChatMessage::new("user", "hi")];
    let (said, turn) = generate_conversation_turn(&mut engine, &tokenizer, &asked, &[], &params(20), 0).unwrap();
    assert_eq!((asked.len(), said.len(), said[1].content.as_str()), (1, 2, "<up>a</up>"));
    assert_eq!((turn.generated(), turn.versions.newest()), ("<up>a</up>".len() + 1, Some(1)));
    assert_ne!(turn.versions, Spans::default());

    let schema = json!({"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]});
    let tools = Toolbox::default()
        .function(ToolSpec::new("up", "", schema), |arguments| Ok(arguments["of"].as_str().unwrap_or_default().to_uppercase()));
    let mut rollout = |turns, stop: fn(&[ChatMessage]) -> bool| {
        let tools = tools.clone();
        let agent = Agent::new(move || tools.clone()).parser(ToolFormat::Xml).limits(|of| of.max_turns = turns);
        let reward = |sample: &Sample| sample.metadata["turns"].as_f64().unwrap();
        let agent = agent.stop_condition(stop);
        create_multiturn_rollout(&mut engine, &tokenizer, asked.clone(), &agent, &params(20), reward).unwrap()
    };
    let whole = rollout(5, |_| false);
    assert_eq!((whole.reward, whole.metadata["stop_reason"].as_str()), (Some(2.0), Some("answered")));
    assert_eq!(whole.metadata["conversation"][2]["content"], "A");
    assert_eq!(rollout(1, |_| false).metadata["stop_reason"], "max_turns");
    assert_eq!(rollout(5, |turns| turns.last().is_some_and(|turn| turn.content == "A")).reward, Some(1.0));
}
