//! KV memory: the block pool and the prefix cache. Knows nothing of requests.

pub mod blocks;
pub mod prefix;
