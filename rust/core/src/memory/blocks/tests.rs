//! Tables and copies on pools of a few blocks.

use super::super::prefix::extend_chain;
use super::*;

fn none() -> std::iter::Empty<&'static BlockCopy> {
    std::iter::empty()
}

fn chain(tokens: std::ops::Range<u32>) -> Vec<BlockHash> {
    let mut chain = Vec::new();
    let tokens: Vec<u32> = tokens.collect();
    extend_chain(&mut chain, BlockHash::root([None; 3]), &tokens, 4);
    chain
}

/// Grows a table on a pool without a host.
fn grow(table: &mut BlockTable, count: u32) -> Result<(), OutOfBlocks> {
    let mut copies = Vec::new();
    let grown = table.grow(count, &mut copies);
    assert!(copies.is_empty());
    grown
}

/// Makes a table on such a pool writable; the copy that this needs.
fn write(
    table: &mut BlockTable,
    first: usize,
    count: u32,
) -> Result<Option<BlockCopy>, OutOfBlocks> {
    let mut copies = Vec::new();
    table.grow_for_writing(first, count, &mut copies)?;
    assert!(copies.len() <= 1);
    Ok(copies.pop())
}

#[test]
fn a_table_takes_and_returns_exactly_its_blocks() {
    let pool = BlockPool::new(4, 0);
    let mut table = pool.table();
    assert_eq!(grow(&mut table, 3), Ok(()));
    assert_eq!(pool.available(), 1);
    assert_eq!(grow(&mut table, 2), Err(OutOfBlocks));
    assert_eq!(pool.available(), 1, "a failed growth changes nothing");
    assert_eq!(table.blocks().len(), 3);
    drop(table);
    assert_eq!(
        pool.usage(),
        PoolUsage {
            free: 4,
            used: 0,
            cached: 0
        }
    );
}

#[test]
fn released_chains_are_found_again_and_evicted_tail_first() {
    let pool = BlockPool::new(3, 0);
    let hashes = chain(0..12);
    let mut table = pool.table();
    grow(&mut table, 3).unwrap();
    for (position, &hash) in hashes.iter().enumerate() {
        table.publish(position, hash);
    }
    let blocks = table.blocks().to_vec();
    drop(table);
    let whole = PrefixMatch {
        num_blocks: 3,
        num_parked: 3,
    };
    assert_eq!(pool.find_prefix(&hashes), whole);
    let mut other = pool.table();
    grow(&mut other, 1).unwrap();
    assert_eq!(other.blocks(), [blocks[2]], "the tail goes first");
    let mut again = pool.table();
    assert_eq!(pool.find_prefix(&hashes).num_blocks, 2);
    again.adopt(&hashes[..2]);
    assert_eq!(again.blocks(), &blocks[..2]);
    assert_eq!(
        pool.usage(),
        PoolUsage {
            free: 0,
            used: 3,
            cached: 0
        }
    );
    pool.audit([&other, &again].into_iter(), none()).unwrap();
}

#[test]
fn a_shared_block_is_copied_before_it_is_written() {
    let pool = BlockPool::new(4, 0);
    let mut parent = pool.table();
    grow(&mut parent, 2).unwrap();
    let mut child = parent.fork();
    assert_eq!((parent.num_exclusive(), child.num_exclusive()), (0, 0));
    let source = child.blocks()[1];
    let copy = write(&mut child, 1, 1).unwrap().expect("shared");
    assert_eq!(copy.source(), source.on(BlockLocation::Device));
    assert_eq!(
        copy.destination(),
        child.blocks()[1].on(BlockLocation::Device)
    );
    assert_eq!(child.blocks().len(), 3);
    assert!(
        write(&mut parent, 1, 0).unwrap().is_none(),
        "the last table writes in place, though the copy still reads"
    );
    let tables = || [&parent, &child].into_iter();
    pool.audit(tables(), [&copy].into_iter()).unwrap();
    pool.audit(tables(), none()).unwrap_err();
    drop(copy);
    pool.audit(tables(), none()).unwrap();
    drop(parent);
    assert_eq!(pool.usage().used, 3);
}

#[test]
fn growing_for_writing_is_all_or_nothing() {
    let pool = BlockPool::new(3, 0);
    let mut parent = pool.table();
    grow(&mut parent, 1).unwrap();
    let mut child = parent.fork();
    // Two are free: one for the copy, and one block more.
    assert!(write(&mut child, 0, 2).is_err());
    assert_eq!(child.blocks(), parent.blocks());
    pool.audit([&parent, &child].into_iter(), none()).unwrap();
    let copy = write(&mut child, 0, 1).unwrap();
    assert!(copy.is_some());
    assert_eq!(pool.available(), 0);
}

#[test]
fn a_copy_keeps_both_its_blocks_until_it_is_over() {
    let pool = BlockPool::new(3, 0);
    let mut parent = pool.table();
    grow(&mut parent, 1).unwrap();
    let mut child = parent.fork();
    let copy = write(&mut child, 0, 0).unwrap().expect("shared");
    assert_eq!(
        (parent.num_exclusive(), child.num_exclusive()),
        (0, 1),
        "the child's copy goes with it, the parent's block is being read"
    );
    drop((parent, child));
    assert_eq!(pool.usage().used, 2);
    let mut other = pool.table();
    assert_eq!(grow(&mut other, 2), Err(OutOfBlocks));
    drop(copy);
    grow(&mut other, 3).unwrap();
}

#[test]
fn equal_content_is_published_once() {
    let pool = BlockPool::new(4, 0);
    let hashes = chain(0..4);
    let (mut one, mut two) = (pool.table(), pool.table());
    grow(&mut one, 1).unwrap();
    grow(&mut two, 1).unwrap();
    one.publish(0, hashes[0]);
    two.publish(0, hashes[0]);
    drop(two);
    assert_eq!(
        pool.usage(),
        PoolUsage {
            free: 3,
            used: 1,
            cached: 0
        }
    );
    drop(one);
    assert_eq!(
        pool.usage(),
        PoolUsage {
            free: 3,
            used: 0,
            cached: 1
        }
    );
}

/// A pool of three blocks, and `num_host_blocks` on the host; its blocks hold `hashes`, used by nobody.
fn filled(hashes: &[BlockHash], num_host_blocks: u32) -> BlockPool {
    let pool = BlockPool::new(3, num_host_blocks);
    let mut table = pool.table();
    grow(&mut table, hashes.len() as u32).unwrap();
    for (position, &hash) in hashes.iter().enumerate() {
        table.publish(position, hash);
    }
    pool.allow_offloads(u32::MAX);
    drop(table);
    pool
}

/// A fresh table of `count` blocks, and the copies to the host that this led to.
fn fresh(pool: &BlockPool, count: u32) -> (BlockTable, Vec<BlockCopy>) {
    let (mut table, mut copies) = (pool.table(), Vec::new());
    table.grow(count, &mut copies).unwrap();
    assert!(copies.iter().all(|copy| copy.kind() == CopyKind::Offload));
    (table, copies)
}

fn land(copies: Vec<BlockCopy>) {
    for copy in copies {
        copy.land();
    }
}

#[test]
fn what_is_evicted_is_on_the_host_once_its_copy_has_landed() {
    let hashes = chain(0..12);
    let pool = filled(&hashes, 4);
    let (table, copies) = fresh(&pool, 2);
    let sources: Vec<_> = copies.iter().map(|copy| copy.source().block).collect();
    assert_eq!(
        sources,
        table.blocks(),
        "its old content, before it is written"
    );
    assert_eq!(pool.find_on_host(&hashes[1..]), 0, "it is not there yet");
    assert_eq!(pool.host_usage().used, 2);
    pool.audit([&table].into_iter(), copies.iter()).unwrap();
    pool.audit([&table].into_iter(), copies[1..].iter())
        .unwrap_err();
    drop(table);
    assert_eq!(
        pool.available(),
        1,
        "blocks that are being read are not free"
    );
    land(copies);
    assert_eq!((pool.available(), pool.host_usage().cached), (3, 2));
    assert_eq!(pool.find_on_host(&hashes[1..]), 2);
    assert_eq!(
        pool.find_prefix(&hashes).num_blocks,
        1,
        "the head is still here"
    );
    pool.audit(std::iter::empty(), none()).unwrap();
}

#[test]
fn a_copy_that_never_landed_leaves_nothing_behind() {
    let hashes = chain(0..12);
    let pool = filled(&hashes, 4);
    drop(fresh(&pool, 3));
    assert_eq!(pool.find_on_host(&hashes), 0);
    assert_eq!((pool.usage().free, pool.host_usage().free), (3, 4));
    pool.audit(std::iter::empty(), none()).unwrap();
}

#[test]
fn what_comes_back_stays_on_the_host_and_is_not_copied_again() {
    let hashes = chain(0..12);
    let pool = filled(&hashes, 4);
    let (mut table, copies) = fresh(&pool, 3);
    land(copies);
    table.release();
    let (table, mut copies) = fresh(&pool, 3);
    assert!(copies.is_empty(), "nothing findable was evicted");
    table.restore(0, &hashes[..2], &mut copies);
    assert_eq!(pool.host_usage().used, 2, "held while they are read");
    let kinds: Vec<_> = copies.iter().map(BlockCopy::kind).collect();
    assert_eq!(kinds, [CopyKind::Restore; 2]);
    pool.audit([&table].into_iter(), copies.iter()).unwrap();
    land(copies);
    for (position, &hash) in hashes[..2].iter().enumerate() {
        table.publish(position, hash);
    }
    drop(table);
    assert_eq!(pool.find_prefix(&hashes).num_blocks, 2);
    let (_table, copies) = fresh(&pool, 3);
    assert!(copies.is_empty(), "the host has it");
    assert_eq!(pool.find_on_host(&hashes), 3);
}

#[test]
fn the_host_evicts_what_was_used_longest_ago_and_nothing_that_is_held() {
    let (old, new) = (chain(0..12), chain(100..112));
    let pool = filled(&old, 3);
    let (table, copies) = fresh(&pool, 3);
    land(copies);
    assert_eq!(pool.touch_on_host(&old[1..2]), 1);
    // The head is being read; of the others the tail has waited longest.
    let mut reading = Vec::new();
    table.restore(0, &old[..1], &mut reading);
    for (position, &hash) in new.iter().enumerate() {
        table.publish(position, hash);
    }
    drop(table);
    let (mut table, copies) = fresh(&pool, 2);
    assert_eq!(
        copies.len(),
        2,
        "for the first there is no place: it is held"
    );
    land(copies);
    assert_eq!(pool.find_on_host(&old[..1]), 1);
    assert_eq!(
        (pool.find_on_host(&old[1..2]), pool.find_on_host(&old[2..])),
        (0, 0)
    );
    assert_eq!(pool.find_on_host(&new[1..]), 2);
    pool.allow_offloads(0);
    drop(reading);
    let mut copies = Vec::new();
    table.grow(1, &mut copies).unwrap();
    assert!(copies.is_empty(), "no more were allowed");
    assert_eq!(pool.find_on_host(&new[..1]), 0);
    pool.audit([&table].into_iter(), none()).unwrap();
}

#[test]
fn a_block_may_go_to_the_host_and_be_filled_from_it_in_one_step() {
    let (old, new) = (chain(0..4), chain(100..104));
    let pool = filled(&old, 2);
    let (table, copies) = fresh(&pool, 3);
    land(copies);
    table.publish(0, new[0]);
    drop(table);
    let (table, mut copies) = fresh(&pool, 3);
    table.restore(2, &old, &mut copies);
    let (offload, restore) = (&copies[0], &copies[1]);
    assert_eq!(offload.source(), restore.destination());
    assert_ne!(offload.destination(), restore.source());
    pool.audit([&table].into_iter(), copies.iter()).unwrap();
    assert_eq!(table.num_exclusive(), 2, "one is still being read");
}
