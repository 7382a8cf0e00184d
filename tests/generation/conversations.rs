//! Conversations on the real engine: N2 (no two turns meet the same random numbers), V3 (in rounds nothing depends on how long environments take),
//! C1 and D4 (stopped anywhere, a conversation goes on in its middle and every token is accounted for).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::generating::{Stopped, generate, policy, sampled, stopped_and_resumed};
use proptest::prelude::*;
use rollflow::data::chat::ChatTemplate;
use rollflow::data::{Answer, ChatMessage};
use rollflow::engine::{LocalEngine, Request, TokenEngine};
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Step};
use rollflow::model::ModelConfig;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::{Agent, EvalSpec, Evaluation};
use rollflow::rollout::{Fate, roll_out, why_lost};
use serde_json::Value;

#[test]
fn n2_a_later_turn_draws_on_where_the_conversation_stands() {
    let (policy, params) =
        (policy(), Arc::new(SamplingParams { max_new_tokens: 12, ignore_eos: true, ..SamplingParams::default() }));
    let mut engine = policy.engine(2, 9);
    let turn = |engine: &mut LocalEngine, tokens: &[u32], offset: usize, answers: Vec<Answer>| {
        let request = Request { first: 1, offset, answers, ..Request::new(4, tokens, 2, params.clone()) };
        engine.submit(request).unwrap();
        engine.run().unwrap().pop().unwrap()
    };
    let first = turn(&mut engine, &[4, 5, 6], 0, Vec::new());
    let mut answer = Answer { index: 1, ..Answer::default() };
    first.tokens.iter().zip(&first.log_probs).for_each(|(token, log_prob)| answer.push(*token, *log_prob, 0));
    answer.give(&[9, 9, 7]);
    let second = turn(&mut engine, &[4, 5, 6], 0, vec![answer.clone()]);
    assert_eq!((first.index, second.index, second.tokens.len()), (1, 1, 27), "a turn's limit is its own");
    assert_eq!(second.tokens[..15], answer.tokens[..]);
    assert_eq!(second.versions.iter().map(|(_, len)| len).collect::<Vec<_>>(), [12, 3, 12]);
    // The same tokens as a prompt of their own draw the same numbers only where they are told where they stand.
    let all = [&[4, 5, 6], &answer.tokens[..]].concat();
    assert_eq!(turn(&mut engine, &all, 15, Vec::new()).tokens, second.tokens[15..]);
    assert_ne!(turn(&mut engine, &all, 0, Vec::new()).tokens, second.tokens[15..]);
}

/// Says how many digits it was told, for three turns; takes its time if it has a clock, and saves its state if it counts how often it is restored.
#[derive(Clone, Default)]
struct Echo {
    turns: u64,
    dawdles: Option<Arc<AtomicU64>>,
    /// If true, its first answer replaces the conversation: a new part begins.
    forgets: bool,
    restored: Option<Arc<AtomicU64>>,
}

impl Environment for Echo {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        Ok(episode.conversation())
    }

    fn step(&mut self, action: &Action, _: Instant) -> Result<Step, EnvError> {
        if let Some(clock) = &self.dawdles {
            std::thread::sleep(Duration::from_micros(clock.fetch_add(7919, SeqCst) % 3000));
        }
        self.turns += 1;
        let digits = action.text.chars().filter(char::is_ascii_digit).count();
        let step = Step::says(digits.to_string()).reward(digits as f64).done(self.turns == 3);
        Ok(Step { restarts: self.forgets && self.turns == 1, ..step })
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::default())
    }

    fn save(&self) -> Option<Value> {
        self.restored.as_ref().map(|_| self.turns.into())
    }

    fn restore(&mut self, state: &Value) -> Result<(), EnvError> {
        self.turns = state.as_u64().ok_or_else(|| EnvError::new("that is no state"))?;
        self.restored.as_ref().map(|restored| restored.fetch_add(1, SeqCst));
        Ok(())
    }
}

fn echo(dawdles: Option<Arc<AtomicU64>>) -> Agent {
    echo_of(Echo { dawdles, ..Echo::default() })
}

fn echo_of(echo: Echo) -> Agent {
    Agent::new(move || echo.clone())
}

/// Groups of a run with this agent, and the tokens that metrics counted.
fn converse(admission: &Admission, agent: Agent) -> (Vec<Group>, f64) {
    generate(admission, 1, Stopped::Never, |generator| generator.environment(agent))
}

#[test]
fn v3_in_rounds_rollouts_are_the_same_to_the_bit_however_long_environments_take() {
    // A credit more than there are prompts: the source asks for one before it sees that it has ended.
    let rounds = || Admission::new(6, 7, None).bounded(0);
    let (swift, _) = converse(&rounds(), echo(None));
    let (slow, _) = converse(&rounds(), echo(Some(Arc::default())));
    let (swift, slow) = (sampled(&swift), sampled(&slow));
    assert!(swift.values().any(|sample| sample.metadata["turns"] == 3), "some have several turns");
    assert_eq!(swift, slow);
}

#[test]
fn v2_a_first_turn_that_has_expired_is_begun_again() {
    let admission = Admission::new(6, 7, None).bounded(1);
    let (publisher, published) = weights();
    let frozen = Arc::new(policy().weights().freeze());
    publisher.publish(1, frozen.clone()).unwrap();
    let agent = echo(None).limits(|of| of.max_turns = 1);
    let groups = std::thread::scope(|scope| {
        scope.spawn(|| {
            while admission.totals().generated < 5 {
                std::thread::sleep(Duration::from_micros(100));
            }
            publisher.publish(10, frozen).unwrap();
            admission.published(10);
        });
        generate(&admission, 1, Stopped::Never, |generator| generator.weights(published).environment(agent)).0
    });
    let versions = |sample: &&Sample| (sample.versions.oldest(), sample.versions.newest());
    let seen: Vec<_> = sampled(&groups).values().map(versions).collect();
    assert!(seen.contains(&(Some(10), Some(10))) && seen.iter().all(|(oldest, newest)| oldest == newest), "{seen:?}");
}

#[test]
fn r249_an_environment_that_saves_its_state_is_restored_rather_than_played_again() {
    for forgets in [false, true] {
        let restored: Arc<AtomicU64> = Arc::default();
        let agent = |restored: Option<&Arc<AtomicU64>>| echo_of(Echo { forgets, restored: restored.cloned(), ..Echo::default() });
        let stops = vec![100, 200, 300];
        let saves = agent(Some(&restored));
        stopped_and_resumed(
            stops,
            |generator| generator.environment(agent(None)),
            |generator| generator.environment(saves.clone()),
        );
        assert!(restored.load(SeqCst) > 0, "some were between two turns");
    }
}

#[test]
fn n2_turns_that_wait_for_memory_are_those_of_a_large_cache() {
    let policy = policy();
    // Most turns end by themselves.
    let params = SamplingParams { max_new_tokens: 24, logit_bias: [(1, 1.0)].into(), ..SamplingParams::default() };
    let rollouts = |tokens: Option<usize>| {
        let mut engine = policy.engine(24, 9).cache_tokens(tokens);
        let prompts = (0..3).map(|ordinal| asked(ordinal, &["1+1="])).collect();
        let groups = roll_out(&mut engine, policy.tokenizer(), Some(&echo(None)), prompts, 8, &params).unwrap();
        let samples = groups.into_iter().flat_map(|group| group.samples);
        samples.map(|sample| (sample.tokens, sample.metadata)).collect::<Vec<_>>()
    };
    let expected = rollouts(None);
    let third = expected.iter().filter(|(tokens, metadata)| metadata["turns"] == 3 && tokens.len() > 66).count();
    assert!(third > 4, "{third} have a third turn after two pages");
    assert_eq!(rollouts(Some(8 * 32)), expected);
}

/// A tokenizer whose template rejects two messages of the user in a row.
fn alternating() -> Tokenizer {
    let source = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must \
                  alternate') }}{% endif %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}assistant: ";
    let template = ChatTemplate::new(source).unwrap();
    Tokenizer::characters("0123456789+=", 16).unwrap().with_chat(template)
}

fn asked(ordinal: u64, texts: &[&str]) -> Prompt {
    let messages: Vec<ChatMessage> = texts.iter().map(|text| ChatMessage::new("user", *text)).collect();
    Prompt { ordinal, ..Prompt::from(messages) }
}

#[test]
fn f6_a_conversation_that_the_template_or_the_engine_rejects_ends_its_own_rollouts() {
    let tokenizer = alternating();
    let first = asked(0, &["1+1="]);
    // Room for a first turn, and for no second one.
    let most = tokenizer.encode_prompt(&first).unwrap().len() + 24 + 10;
    let config = ModelConfig { max_positions: most, ..ModelConfig::small(&tokenizer, 32, 2) };
    let policy = Policy::random(config, tokenizer.clone(), 3).unwrap();
    let prompts = vec![first.clone(), asked(1, &["1", "2"]), asked(2, &[&"1+1=".repeat(4)])];
    let params = SamplingParams { max_new_tokens: 24, ..SamplingParams::default() };
    let groups = roll_out(&mut policy.engine(4, 9), policy.tokenizer(), Some(&echo(None)), prompts, 8, &params).unwrap();
    let [long, refused, longer] = [0, 1, 2].map(|at| &groups[at].samples);
    for (samples, reason, status) in [
        (long, "max_tokens", Status::Truncated),
        (refused, "environment_failed", Status::Aborted),
        (longer, "engine_failed", Status::Aborted),
    ] {
        assert_eq!(samples.len(), 8, "{reason}");
        let ended = |sample: &Sample| (sample.metadata["stop_reason"].clone(), sample.status);
        assert!(samples.iter().all(|sample| ended(sample) == (reason.into(), status)), "{samples:?}");
    }
    assert!(long.iter().any(|sample| sample.generated() < 24), "some have room for the rest of a turn only");
    assert!(long.iter().all(|sample| sample.metadata["grade"] == 0.0), "they are graded");
    assert!(why_lost(&refused[0]).unwrap().contains("roles must alternate"));
    assert!(why_lost(&longer[0]).unwrap().contains("positions"));
    // A cache without room for a second turn ends the run, in whichever turn.
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, 3).unwrap();
    let mut engine = policy.engine(4, 9).cache_tokens(Some(most - 10));
    let error = roll_out(&mut engine, policy.tokenizer(), Some(&echo(None)), vec![first], 8, &params).unwrap_err();
    assert!(error.to_string().contains("raise generate.cache_tokens"), "{error}");
}

#[test]
fn f6_a_prompt_that_the_template_rejects_costs_an_evaluation_its_own_answers() {
    let tokenizer = alternating();
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, 3).unwrap();
    let spec = Arc::new(EvalSpec {
        prompts: vec![asked(0, &["1", "2"]), asked(1, &["1+1="])],
        samples: 2,
        sampling: SamplingParams { max_new_tokens: 4, ..SamplingParams::default() },
        agent: None,
        greedy: false,
        success: 1.0,
        judge: Arc::new(|group| Ok((group, Vec::new()))),
    });
    let mut engine = policy.engine(4, 9);
    let mut evaluation = Evaluation::begin(&spec, policy.tokenizer(), &engine, 0, Vec::new());
    while !evaluation.is_done() {
        evaluation.advance(&mut engine).unwrap();
    }
    let rejected = |error: &Option<String>| error.as_ref().is_some_and(|error| error.contains("roles must alternate"));
    let ended: Vec<_> = evaluation.answers().iter().map(|answer| (answer.question, rejected(&answer.error))).collect();
    assert_eq!(ended, [(0, true), (0, true), (1, false), (1, false)]);
}

/// Answers two turns, and loses its machine for some rollouts: at their second turn, and from then on for good.
struct Doomed {
    lives: Arc<Mutex<BTreeMap<(u64, u32), u32>>>,
    broken: bool,
    turns: usize,
}

impl Environment for Doomed {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let key = (episode.prompt.ordinal, episode.index);
        let mut lives = self.lives.lock().unwrap();
        let life = lives.entry(key).and_modify(|life| *life += 1).or_default();
        self.broken = (key.0 + u64::from(key.1)).is_multiple_of(3);
        match self.broken && *life > 0 {
            true => Err(EnvError::new("no machine is free")),
            false => Ok(episode.conversation()),
        }
    }

    fn step(&mut self, _: &Action, _: Instant) -> Result<Step, EnvError> {
        self.turns += 1;
        match (self.turns, self.broken) {
            (1, _) => Ok(Step::says("12")),
            (_, true) => Err(EnvError::new("the machine is gone")),
            (_, false) => Ok(Step::over()),
        }
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::correct(true))
    }
}

#[test]
fn d4_tokens_of_rollouts_that_lost_their_environment_are_accounted_for() {
    let admission = Admission::new(6, 7, None);
    let lives = Arc::default();
    let make = move || Doomed { lives: Arc::clone(&lives), broken: false, turns: 0 };
    let (groups, counted) = converse(&admission, Agent::new(make).limits(|of| of.replays = 1));
    let lost = groups.iter().flat_map(|group| &group.samples).filter(|sample| sample.status == Status::Aborted);
    assert!(lost.clone().count() > 0 && lost.clone().all(|sample| sample.generated() > 0), "their turns were sampled");
    assert!(lost.clone().all(|sample| sample.metadata["environment_failure"] == "no machine is free"));
    let totals = admission.totals();
    assert_eq!((totals.imbalance(), totals.open_groups, totals.generated as f64), ((0, 0), 0, counted));
}

/// Responds to a first turn and fails at the second. In later lives it takes the first turn otherwise.
struct Fickle {
    lives: Arc<Mutex<BTreeMap<(u64, u32), u32>>>,
    later: Result<Step, EnvError>,
    life: u32,
    turns: usize,
}

impl Environment for Fickle {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let mut lives = self.lives.lock().unwrap();
        let life = lives.entry((episode.prompt.ordinal, episode.index)).or_default();
        self.life = *life;
        *life += 1;
        Ok(episode.conversation())
    }

    fn step(&mut self, _: &Action, _: Instant) -> Result<Step, EnvError> {
        self.turns += 1;
        match (self.life, self.turns) {
            (0, 1) => Ok(Step::says("12")),
            (0, _) => Err(EnvError::new("the machine is gone")),
            _ => self.later.clone(),
        }
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::correct(true))
    }
}

#[test]
fn d4_a_rollout_that_ends_while_its_turns_are_replayed_loses_none_of_their_tokens() {
    let cases = [
        ("late", Err(EnvError::late("it hangs"))),
        ("done", Ok(Step::over())),
        ("no response", Ok(Step::default())),
        ("another conversation", Ok(Step { restarts: true, ..Step::says("12") })),
    ];
    for (case, later) in cases {
        let (admission, lives) = (Admission::new(6, 7, None), Arc::default());
        let make = move || Fickle { lives: Arc::clone(&lives), later: later.clone(), life: 0, turns: 0 };
        let (groups, counted) = converse(&admission, Agent::new(make));
        let totals = admission.totals();
        assert_eq!((totals.imbalance(), totals.open_groups, totals.generated as f64), ((0, 0), 0, counted), "{case}");
        let late =
            groups.iter().flat_map(|group| &group.samples).filter(|sample| sample.metadata["stop_reason"] == "step_timeout");
        let turns = |sample: &Sample| sample.versions.iter().filter(|(version, _)| version.is_some()).count();
        // A contradiction of the record restarts the rollout, and its first tokens count as truncated.
        let restarted = totals.tokens.contains_key(&Fate::Truncated);
        assert_eq!((late.clone().count() > 0, restarted), (case == "late", case != "late"), "{case}");
        assert!(late.clone().all(|sample| turns(sample) == 2), "both turns are in the sample");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Laws C1, D2, D3 and D4: stops at random moments, as by a second Ctrl-C, in the middle of turns and between them.
    #[test]
    fn conversations_stopped_and_resumed_are_those_of_a_run_that_was_not(stops in prop::collection::vec(1u64..500, 1..4)) {
        let slow = || echo(Some(Arc::default()));
        stopped_and_resumed(stops, |generator| generator.environment(echo(None)), |generator| generator.environment(slow()));
    }
}
