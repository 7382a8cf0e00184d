//! Closures as stages: [`map`], [`try_map`], [`filter`], [`filter_map`], [`flat_map`],
//! [`map_async`]; and [`batch`], [`from_iter`].

use std::marker::PhantomData;

use super::{AsyncIo, AsyncStage, Io, Message, Signal, Source, Stage, StageError, StageSpec};

/// Source of the items of an iterator.
pub fn from_iter<I: IntoIterator<Item: Message>>(items: I) -> PerItem<FromIter, I::IntoIter, (), I::Item> {
    PerItem { spec: StageSpec::default(), ..PerItem::new(items.into_iter(), FromIter) }
}

/// Stage that replaces each item with the result of `f`.
pub fn map<F: FnMut(In) -> Out, In: Message, Out: Message>(f: F) -> PerItem<Call<F, In, Out>, F, In, Out> {
    PerItem::new(f, |f, item, io| io.send(f(item)))
}

/// Stage that replaces each item with the result of `f`; an error ends the run (law F3).
pub fn try_map<F, In: Message, Out: Message>(f: F) -> PerItem<Call<F, In, Out>, F, In, Out>
where
    F: FnMut(In) -> Result<Out, StageError>,
{
    PerItem::new(f, |f, item, io| io.send(f(item)?))
}

/// Stage that keeps the items for which `f` returns true.
pub fn filter<F: FnMut(&T) -> bool, T: Message>(f: F) -> PerItem<Call<F, T, T>, F, T, T> {
    PerItem::new(f, |f, item, io| if f(&item) { io.send(item) } else { Ok(()) })
}

/// Stage that replaces each item with the result of `f`, and drops items with none.
pub fn filter_map<F, In: Message, Out: Message>(f: F) -> PerItem<Call<F, In, Out>, F, In, Out>
where
    F: FnMut(In) -> Option<Out>,
{
    PerItem::new(f, |f, item, io| f(item).map_or(Ok(()), |out| io.send(out)))
}

/// Stage that replaces each item with all items that `f` returns.
pub fn flat_map<F, In: Message, Many: IntoIterator<Item: Message>>(f: F) -> PerItem<Call<F, In, Many::Item>, F, In, Many::Item>
where
    F: FnMut(In) -> Many,
{
    PerItem::new(f, |f, item, io| f(item).into_iter().try_for_each(|out| io.send(out)))
}

/// Stage on tokio that replaces each item with the output of `f`'s future; an error ends the run
/// (law F3). Each [worker](PerItem::workers) has one item in work.
pub fn map_async<F, In, Out, Fut>(f: F) -> PerItem<Await, F, In, Out>
where
    F: FnMut(In) -> Fut,
    Fut: Future<Output = Result<Out, StageError>>,
    Out: Message,
{
    PerItem::new(f, Await)
}

/// Stage that collects lists of `n` items. The last list may be shorter; a stop drops it.
pub fn batch<T: Message>(n: usize) -> impl Stage<In = T, Out = Vec<T>> {
    Batched(n.max(1), PhantomData)
}

/// Closure called with every item, as `How` does it; or iterator over the items.
pub struct PerItem<How, F, In, Out> {
    f: F,
    how: How,
    spec: StageSpec,
    /// Copies `f` for further workers.
    copy: Option<fn(&F) -> F>,
    _types: PhantomData<fn(In) -> Out>,
}

/// Calls a closure with an item, and sends the result.
type Call<F, In, Out> = fn(&mut F, In, &mut Io<In, Out>) -> Result<(), StageError>;

/// Marks [`from_iter`].
#[derive(Clone, Copy)]
pub struct FromIter;
/// Marks [`map_async`].
#[derive(Clone, Copy)]
pub struct Await;

impl<How: Copy, F, In, Out> PerItem<How, F, In, Out> {
    fn new(f: F, how: How) -> Self {
        PerItem { f, how, spec: StageSpec::default().knob("workers"), copy: None, _types: PhantomData }
    }

    /// Number of workers, each with a clone of the closure. Default: 1.
    pub fn workers(self, n: usize) -> Self
    where
        F: Clone,
    {
        PerItem { spec: self.spec.workers(n), copy: Some(F::clone), ..self }
    }

    /// Restores the order of the items after several workers (law D6).
    pub fn ordered(self) -> Self {
        self.with(StageSpec::ordered)
    }

    /// Changes the stage's specification.
    pub fn with(self, change: impl FnOnce(StageSpec) -> StageSpec) -> Self {
        PerItem { spec: change(self.spec), ..self }
    }

    /// Returns a further worker, if the closure can be cloned.
    fn another(&self) -> Option<Self> {
        let f = self.copy?(&self.f);
        Some(PerItem { f, spec: self.spec.clone(), ..*self })
    }
}

impl<I: Iterator<Item: Message> + Send + 'static> Source for PerItem<FromIter, I, (), I::Item> {
    type Out = I::Item;

    fn next(&mut self) -> Result<Option<I::Item>, StageError> {
        Ok(self.f.next())
    }

    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }
}

impl<F: Send + 'static, In: Message, Out: Message> Stage for PerItem<Call<F, In, Out>, F, In, Out> {
    type In = In;
    type Out = Out;

    fn run(&mut self, io: &mut Io<In, Out>) -> Result<(), StageError> {
        while let Some(item) = io.recv()? {
            (self.how)(&mut self.f, item, io)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }

    fn replica(&self) -> Option<Self> {
        self.another()
    }
}

impl<F, In, Out, Fut> AsyncStage for PerItem<Await, F, In, Out>
where
    F: FnMut(In) -> Fut + Send + 'static,
    Fut: Future<Output = Result<Out, StageError>> + Send,
    In: Message,
    Out: Message,
{
    type In = In;
    type Out = Out;

    async fn run(&mut self, io: &mut AsyncIo<In, Out>) -> Result<(), StageError> {
        while let Some(item) = io.recv().await? {
            let out = (self.f)(item).await?;
            io.send(out).await?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        self.spec.clone()
    }

    fn replica(&self) -> Option<Self> {
        self.another()
    }
}

/// Stage that collects items into lists of this length; see [`batch`].
struct Batched<T>(usize, PhantomData<fn(T)>);

impl<T: Message> Stage for Batched<T> {
    type In = T;
    type Out = Vec<T>;

    fn run(&mut self, io: &mut Io<T, Vec<T>>) -> Result<(), StageError> {
        let mut items = Vec::new();
        while let Some(item) = io.recv()? {
            items.push(item);
            if items.len() == self.0 {
                io.send(std::mem::take(&mut items))?;
            }
        }
        if items.is_empty() || io.signal() == Signal::Stop { Ok(()) } else { io.send(items) }
    }
}
