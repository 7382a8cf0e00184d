//! Keys, and the state of the screen that they change.

use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::view::RunView;

/// A part of the view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pane {
    /// Stages, edges, reward and throughput.
    #[default]
    Overview,
    /// Curves of all metrics.
    Learning,
    /// Engines, ledger and staleness.
    Engines,
    /// Newest samples.
    Samples,
}

impl Pane {
    /// All panes, in the order of their keys.
    pub const ALL: [Pane; 4] = [Pane::Overview, Pane::Learning, Pane::Engines, Pane::Samples];

    /// The title.
    pub fn title(self) -> &'static str {
        ["Overview", "Learning", "Engines", "Samples"][self as usize]
    }
}

/// An order to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Pause,
    Resume,
    Checkpoint,
    Drain,
    Stop,
}

impl Order {
    /// All orders.
    pub const ALL: [Order; 5] = [Order::Pause, Order::Resume, Order::Checkpoint, Order::Drain, Order::Stop];

    /// The word in the page's route. Its first letter is the key.
    pub fn word(self) -> &'static str {
        ["pause", "resume", "checkpoint", "drain", "stop"][self as usize]
    }

    /// Question before an order that ends the run.
    pub fn question(self) -> Option<&'static str> {
        match self {
            Order::Drain => Some("Drain: finish what is in flight, save and end the run?"),
            Order::Stop => Some("Stop: save and end the run?"),
            _ => None,
        }
    }
}

/// Effect of a key beyond the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Quit,
    Order(Order),
}

/// State of the screen.
#[derive(Debug, Default)]
pub struct Screen {
    pub pane: Pane,
    /// Lines that are scrolled past, by pane.
    pub scroll: [u16; Pane::ALL.len()],
    /// The chosen sample; the newest unless one is chosen.
    pub chosen: Option<(u64, u64, u32, u32)>,
    /// If true, the keys are listed.
    pub help: bool,
    /// An order whose question is open.
    pub asked: Option<Order>,
    /// Result of the last key or order.
    pub message: String,
    /// If true, the frame is printed: without keys.
    pub printed: bool,
    /// Lines of a page, for keys that scroll by it.
    pub page: u16,
}

impl Screen {
    /// Takes a key.
    pub fn press(&mut self, key: KeyEvent, view: &RunView) -> Option<Action> {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Action::Quit);
        }
        self.message.clear();
        if let Some(order) = self.asked.take() {
            let confirmed = matches!(key.code, KeyCode::Char('y' | 'Y'));
            self.message = if confirmed { String::new() } else { format!("not ordered: {}", order.word()) };
            return confirmed.then_some(Action::Order(order));
        }
        if std::mem::take(&mut self.help) {
            return None;
        }
        match key.code {
            KeyCode::Char('q') => return Some(Action::Quit),
            KeyCode::Char('?') => self.help = true,
            KeyCode::Tab => self.pane = self.neighbour(1),
            KeyCode::BackTab => self.pane = self.neighbour(Pane::ALL.len() - 1),
            KeyCode::Char(digit @ '1'..='4') => self.pane = Pane::ALL[digit as usize - '1' as usize],
            KeyCode::Up | KeyCode::Char('k') => self.step(-1, view),
            KeyCode::Down | KeyCode::Char('j') => self.step(1, view),
            KeyCode::PageUp => self.scroll_by(-i32::from(self.page.max(1))),
            KeyCode::PageDown | KeyCode::Char(' ') => self.scroll_by(i32::from(self.page.max(1))),
            KeyCode::Home => (self.chosen, self.scroll[self.pane as usize]) = (None, 0),
            KeyCode::Char(letter) => {
                let order = Order::ALL.into_iter().find(|order| order.word().starts_with(letter))?;
                match (view.without_orders(), order.question()) {
                    (Some(why), _) => self.message = why.to_owned(),
                    (None, Some(_)) => self.asked = Some(order),
                    (None, None) => return Some(Action::Order(order)),
                }
            }
            _ => {}
        }
        None
    }

    fn neighbour(&self, by: usize) -> Pane {
        Pane::ALL[(self.pane as usize + by) % Pane::ALL.len()]
    }

    /// Chooses the sample above or below, or scrolls.
    fn step(&mut self, by: i32, view: &RunView) {
        if self.pane != Pane::Samples {
            return self.scroll_by(by);
        }
        let at = self.place(view) as i64 + i64::from(by);
        let at = at.clamp(0, view.samples.len().saturating_sub(1) as i64) as usize;
        // The newest is followed.
        self.chosen = view.samples.iter().rev().nth(at).filter(|_| at > 0).map(|sample| sample.key());
        self.scroll[Pane::Samples as usize] = 0;
    }

    fn scroll_by(&mut self, by: i32) {
        let scroll = &mut self.scroll[self.pane as usize];
        *scroll = (i32::from(*scroll) + by).clamp(0, i32::from(u16::MAX)) as u16;
    }

    /// Place of the chosen sample, from the newest.
    pub fn place(&self, view: &RunView) -> usize {
        let chosen = |key| view.samples.iter().rev().position(|sample| sample.key() == key);
        self.chosen.and_then(chosen).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::{Connection, ShownSample};

    fn press(screen: &mut Screen, view: &RunView, keys: &str) -> Option<Action> {
        let key = |key: char| match key {
            '\t' => KeyCode::Tab,
            '<' => KeyCode::BackTab,
            other => KeyCode::Char(other),
        };
        keys.chars().map(|char| screen.press(key(char).into(), view)).last().flatten()
    }

    fn steerable() -> RunView {
        RunView { connection: Connection::Connected, paused: Some(false), ..RunView::default() }
    }

    #[test]
    fn tab_and_digits_switch_panes_and_q_or_ctrl_c_quits() {
        let (mut screen, view) = (Screen::default(), RunView::default());
        let panes = ["\t", "\t", "<", "4", "\t", "<"].map(|keys| {
            assert_eq!(press(&mut screen, &view, keys), None);
            screen.pane
        });
        assert_eq!(panes, [Pane::Learning, Pane::Engines, Pane::Learning, Pane::Samples, Pane::Overview, Pane::Samples]);
        assert_eq!(press(&mut screen, &view, "q"), Some(Action::Quit));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        screen.asked = Some(Order::Stop);
        assert_eq!(screen.press(interrupt, &view), Some(Action::Quit), "a question does not hold it up");
    }

    #[test]
    fn orders_that_end_a_run_ask_first() {
        let (mut screen, view) = (Screen::default(), steerable());
        assert_eq!(press(&mut screen, &view, "c"), Some(Action::Order(Order::Checkpoint)));
        assert_eq!(press(&mut screen, &view, "p"), Some(Action::Order(Order::Pause)));
        assert_eq!((press(&mut screen, &view, "d"), screen.asked), (None, Some(Order::Drain)));
        assert_eq!(press(&mut screen, &view, "q"), None, "any key but y is no");
        assert!(screen.asked.is_none() && screen.message.contains("drain"));
        assert_eq!(press(&mut screen, &view, "dy"), Some(Action::Order(Order::Drain)));
        assert_eq!(press(&mut screen, &view, "sy"), Some(Action::Order(Order::Stop)));
    }

    #[test]
    fn without_a_token_or_a_page_a_key_says_what_to_do() {
        let mut screen = Screen::default();
        for (view, advice) in [
            (RunView::default(), "--page"),
            (RunView { paused: None, ..steerable() }, "--token-env"),
            (RunView { connection: Connection::Lost(String::new()), ..RunView::default() }, "not connected"),
        ] {
            assert_eq!(press(&mut screen, &view, "d"), None);
            assert!(screen.message.contains(advice) && screen.asked.is_none(), "{}", screen.message);
        }
    }

    #[test]
    fn the_chosen_sample_stays_chosen_when_new_ones_come() {
        let (mut screen, mut view) = (Screen { pane: Pane::Samples, ..Screen::default() }, RunView::default());
        let add = |view: &mut RunView, step| view.add_sample(ShownSample { step, ..ShownSample::default() });
        (1..=3).for_each(|step| add(&mut view, step));
        press(&mut screen, &view, "j");
        assert_eq!((screen.chosen, screen.place(&view)), (Some((2, 0, 0, 0)), 1));
        add(&mut view, 4);
        assert_eq!(screen.place(&view), 2);
        press(&mut screen, &view, "kkkk");
        assert_eq!((screen.chosen, screen.place(&view)), (None, 0), "the newest is followed");
        press(&mut screen, &view, "jjjjjjj");
        assert_eq!(screen.place(&view), 3);
    }

    #[test]
    fn parts_of_a_rollout_are_chosen_one_after_the_other_and_a_repeated_one_is_replaced() {
        let (mut screen, mut view) = (Screen { pane: Pane::Samples, ..Screen::default() }, RunView::default());
        let sample = |index, part| ShownSample { index, part, ..ShownSample::default() };
        [(0, 0), (1, 0), (1, 1), (1, 0)].into_iter().for_each(|(index, part)| view.add_sample(sample(index, part)));
        assert_eq!(view.samples.len(), 3);
        press(&mut screen, &view, "jjj");
        assert_eq!((screen.place(&view), screen.chosen), (2, Some((0, 0, 0, 0))));
    }
}
