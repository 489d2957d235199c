//! The door: how much may be at it and behind it.
//!
//! A [`Place`] is taken before a prompt is even tokenised, and given back when the request is first
//! scheduled, rejected, aborted, given up or dropped, whichever comes first: it is an owned value, so no
//! exit path can forget it. It counts at the door of the engine, of the class and of the tenant at once,
//! or at none: a burst of `n` over a bound of `c` gets exactly `c` places. Tokens are counted when they
//! are known.

use std::cell::Cell;
use std::rc::Rc;

/// What is at one door and behind it; clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Door(Rc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    requests: Cell<u32>,
    tokens: Cell<u64>,
}

impl Door {
    /// Answers at the door and waiting.
    pub fn queued(&self) -> u32 {
        self.0.requests.get()
    }

    /// Prompt tokens waiting.
    pub fn queued_tokens(&self) -> u64 {
        self.0.tokens.get()
    }

    fn add(&self, requests: i64, tokens: i64) {
        let Counts {
            requests: r,
            tokens: t,
        } = &*self.0;
        r.set((i64::from(r.get()) + requests) as u32);
        t.set((t.get() as i64 + tokens) as u64);
    }

    fn has_room(&self, requests: u32, bound: Option<u32>) -> bool {
        bound.is_none_or(|bound| u64::from(self.queued()) + u64::from(requests) <= u64::from(bound))
    }
}

/// The three doors of a request: the engine's, its class's and its tenant's.
#[derive(Clone, Debug)]
pub struct Doors {
    /// Everybody's.
    pub engine: Door,
    /// Its class's.
    pub class: Door,
    /// Its tenant's.
    pub tenant: Door,
}

/// The most that may be at each of the three doors; `None` is no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// At everybody's.
    pub engine: Option<u32>,
    /// At the class's.
    pub class: Option<u32>,
    /// At the tenant's.
    pub tenant: Option<u32>,
}

/// The door that has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Everybody's.
    Engine,
    /// The class's.
    Class,
    /// The tenant's.
    Tenant,
}

impl Doors {
    /// Takes a place for `n` answers, or says which door has no room.
    pub fn take(&self, n: u32, bounds: Bounds) -> Result<Place, Full> {
        let mut place = Place {
            doors: self.clone(),
            n: 0,
            tokens: 0,
        };
        place.resize(n, bounds)?;
        Ok(place)
    }

    fn add(&self, requests: i64, tokens: i64) {
        for door in [&self.engine, &self.class, &self.tenant] {
            door.add(requests, tokens);
        }
    }
}

/// A place at the door or in the queue; given back on drop.
#[derive(Debug)]
pub struct Place {
    doors: Doors,
    n: u32,
    tokens: u64,
}

impl Place {
    /// Makes it a place for `n` answers, or says which door has no room and changes nothing.
    pub fn resize(&mut self, n: u32, bounds: Bounds) -> Result<(), Full> {
        let more = n.saturating_sub(self.n);
        let doors = &self.doors;
        let checks = [
            (&doors.tenant, bounds.tenant, Full::Tenant),
            (&doors.class, bounds.class, Full::Class),
            (&doors.engine, bounds.engine, Full::Engine),
        ];
        for (door, bound, full) in checks {
            if more > 0 && !door.has_room(more, bound) {
                return Err(full);
            }
        }
        doors.add(i64::from(n) - i64::from(self.n), 0);
        self.n = n;
        Ok(())
    }

    /// Counts the prompt's tokens, once they are known.
    pub fn count_tokens(&mut self, tokens: u64) {
        self.doors.add(0, tokens as i64 - self.tokens as i64);
        self.tokens = tokens;
    }

    /// Answers it counts for.
    pub fn n(&self) -> u32 {
        self.n
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.doors.add(-i64::from(self.n), -(self.tokens as i64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_gets_exactly_the_places_there_are() {
        let doors = Doors {
            engine: Door::default(),
            class: Door::default(),
            tenant: Door::default(),
        };
        let other = Doors {
            tenant: Door::default(),
            ..doors.clone()
        };
        let bounds = Bounds {
            engine: Some(7),
            class: Some(5),
            tenant: Some(3),
        };
        let mut places: Vec<_> = (0..20).filter_map(|_| doors.take(1, bounds).ok()).collect();
        assert_eq!((places.len(), doors.engine.queued()), (3, 3));
        assert_eq!(doors.take(1, bounds).unwrap_err(), Full::Tenant);
        // Two answers fit the class, three do not, and nothing is counted for them.
        assert_eq!(other.take(3, bounds).unwrap_err(), Full::Class);
        assert_eq!(doors.engine.queued(), 3);
        places.push(other.take(2, bounds).unwrap());
        let narrow = Bounds {
            engine: Some(5),
            ..bounds
        };
        places.pop();
        let mut place = other.take(1, narrow).unwrap();
        assert_eq!(place.resize(3, narrow), Err(Full::Class));
        assert_eq!(place.resize(2, narrow), Ok(()));
        place.count_tokens(40);
        assert_eq!(
            (doors.engine.queued(), doors.class.queued_tokens()),
            (5, 40)
        );
        let outside = Doors {
            class: Door::default(),
            ..other
        };
        assert_eq!(outside.take(1, narrow).unwrap_err(), Full::Engine);
        drop((places, place));
        let left = (doors.engine.queued(), doors.engine.queued_tokens());
        assert_eq!(left, (0, 0));
    }
}
