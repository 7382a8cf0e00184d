//! What sequences begin with, as a radix tree whose edges are pages of tokens (Zheng et al., 2024:
//! RadixAttention).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Included, Unbounded};

use super::pages::PAGE;

/// Remembered beginnings of sequences, by the weights of their keys and values.
///
/// A node is a page: what it holds follows what the nodes above it hold. Only a whole page has others below
/// it. Cost of a look: the tokens that are found, and a logarithm for each page.
#[derive(Default)]
pub(super) struct PrefixTree {
    nodes: BTreeMap<usize, Node>,
    /// The nodes of first pages.
    roots: BTreeMap<u64, Children>,
    /// Nodes without others below, and when they were last used.
    leaves: BTreeSet<(u64, usize)>,
    /// Nodes so far, and looks so far.
    made: usize,
    looks: u64,
}

/// Nodes by their tokens. What shares most with given tokens is next to them in this order.
type Children = BTreeMap<Box<[u32]>, usize>;

struct Node {
    above: Above,
    tokens: Box<[u32]>,
    page: u32,
    below: Children,
    used: u64,
}

#[derive(Clone, Copy)]
enum Above {
    Root(u64),
    Node(usize),
}

/// What became of a sequence's pages.
#[derive(Default)]
pub(super) struct Inserted {
    /// Pages that the tree has taken.
    pub taken: Vec<u32>,
    /// Pages that it had, which others replace.
    pub left: Vec<u32>,
    /// For each page of the sequence that of the tree, which holds the same.
    pub pages: Vec<u32>,
}

/// Number of tokens that two sequences share at their beginning.
pub(crate) fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl PrefixTree {
    /// The pages of the longest known beginning of `tokens`, and how many tokens that is. They become the last
    /// used.
    pub fn find(&mut self, weights: u64, tokens: &[u32]) -> (Vec<u32>, usize) {
        self.looks += 1;
        let (mut pages, mut known, mut above) = (Vec::new(), 0, Above::Root(weights));
        while let Some(children) = self.below(above) {
            let rest = &tokens[known..];
            let rest = &rest[..rest.len().min(PAGE)];
            let neighbours = [
                children.range::<[u32], _>((Unbounded, Included(rest))).next_back(),
                children.range::<[u32], _>((Excluded(rest), Unbounded)).next(),
            ];
            let most = neighbours.into_iter().flatten().map(|(tokens, id)| (shared(tokens, rest), *id)).max();
            let Some((more, id)) = most.filter(|(more, _)| *more > 0) else { break };
            self.touch(id);
            pages.push(self.nodes[&id].page);
            known += more;
            above = Above::Node(id);
            if more < PAGE {
                break;
            }
        }
        (pages, known)
    }

    /// Remembers a sequence that these pages hold.
    pub fn insert(&mut self, weights: u64, tokens: &[u32], pages: &[u32]) -> Inserted {
        self.looks += 1;
        self.roots.entry(weights).or_default();
        let (mut done, mut above) = (Inserted::default(), Above::Root(weights));
        for (tokens, &page) in tokens.chunks(PAGE).zip(pages) {
            let Some(children) = self.below(above) else { break };
            let next = children.range::<[u32], _>((Included(tokens), Unbounded)).next();
            let (id, own) = match next {
                Some((longer, &id)) if longer.starts_with(tokens) => (id, self.nodes[&id].page),
                _ => {
                    let before = children.range::<[u32], _>((Unbounded, Excluded(tokens))).next_back();
                    let shorter = before.filter(|(shorter, _)| tokens.starts_with(shorter)).map(|(_, &id)| id);
                    done.left.extend(shorter.and_then(|id| self.remove(id)));
                    done.taken.push(page);
                    (self.add(above, tokens, page), page)
                }
            };
            self.touch(id);
            done.pages.push(own);
            above = Above::Node(id);
        }
        done
    }

    fn add(&mut self, above: Above, tokens: &[u32], page: u32) -> usize {
        if let Above::Node(id) = above {
            self.leaves.remove(&(self.nodes[&id].used, id));
        }
        self.made += 1;
        let (id, used) = (self.made, self.looks);
        self.nodes.insert(id, Node { above, tokens: tokens.into(), page, below: Children::new(), used });
        self.leaves.insert((used, id));
        if let Some(children) = self.below_mut(above) {
            children.insert(tokens.into(), id);
        }
        id
    }

    fn touch(&mut self, id: usize) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if self.leaves.remove(&(node.used, id)) {
            self.leaves.insert((self.looks, id));
        }
        node.used = self.looks;
    }

    fn below(&self, above: Above) -> Option<&Children> {
        match above {
            Above::Root(weights) => self.roots.get(&weights),
            Above::Node(id) => self.nodes.get(&id).map(|node| &node.below),
        }
    }

    fn below_mut(&mut self, above: Above) -> Option<&mut Children> {
        match above {
            Above::Root(weights) => self.roots.get_mut(&weights),
            Above::Node(id) => self.nodes.get_mut(&id).map(|node| &mut node.below),
        }
    }

    /// Forgets the least recently used page that is free and that no other follows. Returns it.
    pub fn evict(&mut self, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        let leaf = self.leaves.iter().find(|(_, id)| is_free(self.nodes[id].page)).copied()?;
        self.remove(leaf.1)
    }

    /// Removes a leaf. Returns its page.
    fn remove(&mut self, id: usize) -> Option<u32> {
        let node = self.nodes.remove(&id)?;
        self.leaves.remove(&(node.used, id));
        let children = self.below_mut(node.above)?;
        children.remove(&node.tokens);
        if let (true, Above::Node(id)) = (children.is_empty(), node.above) {
            self.leaves.insert((self.nodes[&id].used, id));
        }
        Some(node.page)
    }

    /// Forgets sequences under weights that are not `kept`. Returns their pages.
    pub fn forget(&mut self, kept: impl Fn(u64) -> bool) -> Vec<u32> {
        let gone = self.roots.extract_if(.., |weights, _| !kept(*weights));
        let mut ids: Vec<usize> = gone.flat_map(|(_, children)| children.into_values()).collect();
        let mut pages = Vec::new();
        while let Some(id) = ids.pop() {
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.leaves.remove(&(node.used, id));
            ids.extend(node.below.into_values());
            pages.push(node.page);
        }
        pages
    }
}
