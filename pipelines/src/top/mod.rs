//! `rollflow top`: a run on a terminal, as it happens or afterwards. Sources (`folder`, `page`) fill a
//! view, `draw` makes frames of it, `keys` changes what they show.

mod answers;
mod curve;
mod draw;
mod folder;
mod keys;
mod page;
mod totals;
mod view;

use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::{DefaultTerminal, Terminal};
use rollflow::flow::Interrupts;
use rollflow::net::Endpoint;
use rollflow::util::causes::full_message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

pub use answers::Wanted;
pub use draw::Theme;
pub use folder::Folder;
pub use keys::Pane;
use keys::{Action, Screen};
pub use page::{Page, PageError};
use view::{Connection, RunView};

/// Time between two frames.
const FRAME: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
/// Time between two looks at the files of a folder.
const LOOK: Duration = Duration::from_secs(1);
/// Advice for a run without a page.
const BARE: &str = "files only; a run with --page 127.0.0.1:7860 shows edges and engines, and takes orders";
/// Longest wait for a page before one frame is printed.
const PAGE: Duration = Duration::from_secs(10);

/// Sources of a view, and the view.
pub struct Viewer {
    folder: Option<Folder>,
    page: Option<Page>,
    /// Token for pages that a folder names.
    endpoint: Endpoint,
    /// Address of the page that the folder names.
    address: Option<SocketAddr>,
    view: RunView,
}

/// The terminal, which gets its former state back when this is dropped. A panic restores it first.
struct Restored(ManuallyDrop<DefaultTerminal>);

impl Drop for Restored {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing. ratatui's own `drop` would print an error to it, and
        // printing to a terminal that is gone panics.
        self.0.show_cursor().ok();
        ratatui::try_restore().ok();
    }
}

impl Viewer {
    /// A viewer of a live page.
    pub fn of_page(page: Page) -> Self {
        let endpoint = Endpoint::new("");
        Viewer { folder: None, page: Some(page), endpoint, address: None, view: RunView::default() }
    }

    /// A viewer of a folder, and of the page that its run has. The endpoint holds the page's token.
    pub fn of_folder(folder: Folder, endpoint: Endpoint) -> Self {
        Viewer { folder: Some(folder), page: None, endpoint, address: None, view: RunView::default() }
    }

    /// Opens the page of the process that works on the folder's run, and closes that of an earlier one.
    fn find_page(&mut self) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let address = folder.page();
        let bare = folder.is_running() && address.is_none();
        self.view.note = if bare { BARE.to_owned() } else { String::new() };
        if address != self.address {
            (self.page, self.address, self.view.connection) = (None, address, Connection::Files);
            if let Some(address) = address {
                let endpoint = Endpoint { url: format!("http://{address}"), ..self.endpoint.clone() };
                let page = Page::open(endpoint, folder.wanted())?;
                page.follow();
                self.page = Some(page);
            }
        }
        Ok(())
    }

    /// Reads the sources. Returns results of orders.
    fn read(&mut self, files: bool) -> Result<Vec<String>> {
        self.find_page()?;
        let messages = self.page.as_mut().map_or_else(Vec::new, |page| page.read(&mut self.view));
        if let Some(folder) = self.folder.as_mut().filter(|_| files) {
            if self.view.planned.is_none() {
                self.view.planned = folder.planned().map(|planned| planned.steps);
            }
            folder.read(&mut self.view)?;
        }
        Ok(messages)
    }

    /// One frame as text.
    pub fn once(mut self, pane: Pane, width: u16, height: u16) -> Result<String> {
        self.find_page()?;
        let until = Instant::now() + PAGE;
        while self.page.as_ref().is_some_and(|page| !page.is_ready()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.read(true)?;
        let mut terminal = Terminal::new(TestBackend::new(width, height))?;
        let mut screen = Screen { pane, printed: true, ..Screen::default() };
        terminal.draw(|frame| draw::draw(frame, &self.view, &mut screen, Theme::default()))?;
        let buffer = terminal.backend().buffer();
        let row = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
        let rows = buffer.content.chunks(width.max(1).into()).map(row);
        let text: String = rows.map(|row| row.trim_end().to_owned() + "\n").collect();
        Ok(text.trim_end().to_owned() + "\n")
    }

    /// Shows frames and takes keys until the user quits.
    pub fn watch(mut self, pane: Pane, theme: Theme) -> Result<()> {
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        // Errors of the sources are shown before the screen is taken.
        self.read(true)?;
        let mut screen = Screen { pane, ..Screen::default() };
        let terminal = ratatui::try_init().inspect_err(|_| drop(ratatui::try_restore()));
        let mut terminal = Restored(ManuallyDrop::new(terminal.context("taking over the terminal")?));
        let mut looked = Instant::now();
        while !interrupts.pressed() {
            let files = looked.elapsed() >= LOOK;
            if files {
                looked = Instant::now();
            }
            match self.read(files) {
                Ok(messages) => screen.message = messages.last().cloned().unwrap_or(screen.message),
                Err(error) => screen.message = view::line(&full_message(error.as_ref())),
            }
            terminal.0.draw(|frame| draw::draw(frame, &self.view, &mut screen, theme)).context("drawing")?;
            wait_for_input()?;
            while event::poll(Duration::ZERO).context("waiting for keys")? {
                let Event::Key(key) = event::read().context("reading keys")? else { continue };
                if key.kind == KeyEventKind::Release {
                    continue;
                }
                match screen.press(key, &self.view) {
                    Some(Action::Quit) => return Ok(()),
                    Some(Action::Order(order)) => {
                        screen.message = format!("sending the order: {}", order.word());
                        self.page.iter().for_each(|page| page.order(order.word()));
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}

/// Waits for a key, a signal or the next frame. A terminal that is gone is an error here, because
/// crossterm would read its end for ever.
fn wait_for_input() -> Result<()> {
    let stdin = std::io::stdin();
    let mut input = [PollFd::new(&stdin, PollFlags::IN)];
    match poll(&mut input, Some(&FRAME)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error).context("waiting for keys"),
    }
    let gone = input[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
    ensure!(!gone, "the terminal was closed");
    Ok(())
}
