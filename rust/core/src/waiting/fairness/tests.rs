//! What only shows from inside: counters about to overflow, and flows that are forgotten.

use super::*;
use crate::request::SequenceKey;
use crate::waiting::order::OrderArena;

/// Flows with something waiting in each.
struct Tree {
    flows: Flows,
    orders: OrderArena,
    root: FlowKey,
    number: u64,
}

impl Tree {
    fn new() -> Self {
        let mut flows = Flows::new(true);
        Self {
            root: flows.add_root(),
            flows,
            orders: OrderArena::default(),
            number: 0,
        }
    }

    fn acquire(&mut self, name: &str, weight: f64) -> FlowKey {
        self.flows.acquire(self.root, &name.into(), weight)
    }

    /// One more request waits in a flow.
    fn push(&mut self, leaf: FlowKey) {
        self.number += 1;
        let key = OrderKey {
            number: self.number,
            ..OrderKey::default()
        };
        let tree = self.flows.waiting_mut(leaf);
        self.orders.insert(tree, key, SequenceKey(0), 1);
        self.settle(leaf, 1, 0);
    }

    /// The first request of a flow leaves.
    fn pop(&mut self, leaf: FlowKey) {
        let (key, _) = self
            .orders
            .first(self.flows.waiting(leaf))
            .expect("one waits");
        self.orders.remove(self.flows.waiting_mut(leaf), key);
        self.settle(leaf, 0, 1);
    }

    fn settle(&mut self, leaf: FlowKey, added: Units, removed: Units) {
        let first = self.orders.first(self.flows.waiting(leaf));
        let first = first.map(|(key, _)| key);
        self.flows.changed(leaf, added, removed, first);
        self.flows.audit().expect("consistent books");
    }

    fn service(&self, key: FlowKey) -> u64 {
        self.flows.account(key).service
    }
}

#[test]
fn lowering_the_counters_changes_nobody_s_turn() {
    let mut trees = [Tree::new(), Tree::new()];
    let weights = [1.0, 3.0, 0.5, 2.0, 1.0];
    let flows = weights.map(|weight| {
        let [flow, same] = trees.each_mut().map(|tree| {
            tree.acquire(
                &format!("weight {weight} {}", tree.flows.num_flows()),
                weight,
            )
        });
        assert_eq!(flow, same);
        flow
    });
    for tree in &mut trees {
        for flow in flows {
            tree.push(flow);
            while tree.service(flow) < REBASE_TO {
                tree.flows.charge(flow, 1 << 40);
            }
        }
    }
    trees[0].flows.rebase_above = REBASE_TO + (1 << 58);
    let mut lowered = 0;
    for turn in 0_u64..20_000 {
        let [next, expected] = trees.each_mut().map(|tree| {
            let next = tree.flows.next_leaf(tree.root).expect("somebody waits");
            tree.pop(next);
            next
        });
        assert_eq!(next, expected, "turn {turn}");
        let before = trees[0].service(next);
        for tree in &mut trees {
            // One in four is away for a while.
            tree.flows.charge(next, (turn % 7 + 1) << 30);
            if turn % 4 > 0 {
                tree.push(next);
            }
            let back = flows[turn as usize % 5];
            if tree.flows.waiting(back).is_empty() {
                tree.push(back);
            }
        }
        lowered += u32::from(trees[0].service(next) < before);
        if turn % 100 == 0 {
            trees[1].restart(&flows);
        }
    }
    assert!(lowered > 10, "{lowered} times");
}

impl Tree {
    /// Keeps the counters of a tree that is never rebased where they cannot overflow.
    fn restart(&mut self, flows: &[FlowKey]) {
        let least = flows.iter().map(|&flow| self.service(flow)).min();
        let lower = least.unwrap_or(0).saturating_sub(REBASE_TO);
        for &flow in flows {
            let service = self.service(flow) - lower;
            self.flows.account_mut(flow).service = service;
            if let Some(old) = self.flows.flow(flow).standing {
                self.flows.stand(self.root, flow, old, service_key(service));
            }
        }
    }
}

#[test]
fn what_is_refunded_after_counters_were_lowered_never_underflows() {
    let mut tree = Tree::new();
    let [eager, idle] = ["eager", "idle"].map(|name| tree.acquire(name, 1.0));
    tree.push(idle);
    tree.push(eager);
    tree.flows.charge(idle, 5);
    tree.pop(idle);
    tree.flows.rebase_above = REBASE_TO + 1_000;
    for _ in 0..8 {
        tree.flows.charge(eager, 1 << 39);
    }
    let served = tree.flows.served(eager);
    assert_eq!(served, 8 << 39, "what was served is never lowered");
    assert!(
        tree.service(eager) < REBASE_TO + (1 << 60),
        "it was lowered"
    );
    tree.flows.refund(eager, served);
    tree.flows.refund(idle, 5);
    assert_eq!(tree.flows.served(eager), 0);
    tree.push(idle);
    assert!(tree.flows.next_leaf(tree.root).is_some());
}

#[test]
fn no_price_and_no_weight_overflows_a_counter() {
    let mut tree = Tree::new();
    let [light, other] = [("light", 0.001), ("other", 1_000.0)].map(|(name, weight)| {
        let flow = tree.acquire(name, weight);
        tree.push(flow);
        flow
    });
    for _ in 0..100 {
        tree.flows.charge(light, 1 << 42);
        tree.flows.charge(other, 1 << 42);
        tree.flows.work_before(light, 1 << 50);
    }
    assert_eq!(tree.flows.next_leaf(tree.root), Some(other));
}

#[test]
fn an_idle_flow_is_forgotten_unless_it_owes() {
    let mut tree = Tree::new();
    let [steady, owes, quits] = ["steady", "owes", "quits"].map(|name| tree.acquire(name, 1.0));
    let at_first = tree.flows.num_flows();
    for flow in [steady, owes, quits] {
        tree.push(flow);
    }
    tree.flows.charge(owes, 100);
    tree.pop(owes);
    tree.pop(quits);
    tree.flows.release(quits);
    tree.flows.release(owes);
    assert_eq!(tree.flows.num_flows(), at_first - 1, "a lift restores it");
    let debt = tree.service(owes);
    assert_eq!(tree.acquire("owes", 1.0), owes, "it was remembered");
    assert_eq!(tree.service(owes), debt);
    tree.flows.release(owes);
    tree.flows.charge(steady, 101);
    let newcomer = tree.acquire("newcomer", 1.0);
    tree.push(newcomer);
    assert_eq!(
        tree.flows.num_flows(),
        at_first - 1,
        "the newcomer is there and who owed is not, being no further than all others"
    );
}

#[test]
fn debts_beyond_a_bound_are_forgiven_the_smallest_first() {
    let mut tree = Tree::new();
    let steady = tree.acquire("steady", 1.0);
    tree.push(steady);
    for debt in 1..=MAX_IDLE as u64 + 10 {
        let flow = tree.acquire(&format!("user {debt}"), 1.0);
        tree.flows.charge(flow, debt);
        tree.flows.release(flow);
    }
    assert_eq!(tree.flows.num_flows(), 2 + MAX_IDLE);
    let known = |debt: u64| tree.flows.child(tree.root, &format!("user {debt}"));
    assert!(known(10).is_none() && known(11).is_some());
}

#[test]
fn the_counter_of_a_flow_that_was_forgotten_still_counts_if_it_left_last() {
    let mut tree = Tree::new();
    let [owes, quits] = ["owes", "quits"].map(|name| tree.acquire(name, 1.0));
    for flow in [owes, quits] {
        tree.push(flow);
    }
    tree.flows.charge(owes, 100);
    tree.flows.charge(quits, 50);
    for flow in [owes, quits] {
        tree.pop(flow);
        tree.flows.release(flow);
    }
    assert_eq!(tree.flows.child(tree.root, "quits"), None);
    let newcomer = tree.acquire("newcomer", 1.0);
    tree.push(newcomer);
    assert_eq!(tree.service(newcomer), 50 * divisor(1.0));
}

#[test]
fn a_flow_that_comes_back_has_the_weight_of_its_tenant_now() {
    let mut tree = Tree::new();
    let flow = tree.acquire("flow", 1.0);
    tree.acquire("flow", 4.0);
    tree.flows.charge(flow, 4_000);
    assert_eq!(tree.service(flow), divisor(1.0) * 1_000);
}
