//! The door: how many requests may be at it and behind it.
//!
//! A [`Place`] is taken before a prompt is even tokenised, and given back when the request is first
//! scheduled, refused, aborted or dropped, whichever comes first: it is an owned value, so no exit
//! path can forget it. A burst of `n` over a bound of `c` gets exactly `c` places.

use std::cell::Cell;
use std::rc::Rc;

use crate::error::SubmitError;

/// Counts places; clones share the count.
#[derive(Clone, Debug)]
pub struct Gate {
    queued: Rc<Cell<u32>>,
    max_queued_requests: u32,
}

impl Gate {
    /// A door with room for so many requests.
    pub fn new(max_queued_requests: u32) -> Self {
        Self {
            queued: Rc::new(Cell::new(0)),
            max_queued_requests,
        }
    }

    /// Takes a place, or says that there is none.
    pub fn reserve(&self) -> Result<Place, SubmitError> {
        let queued = self.queued.get();
        if queued >= self.max_queued_requests {
            return Err(SubmitError::QueueFull {
                queued,
                max_queued_requests: self.max_queued_requests,
            });
        }
        self.queued.set(queued + 1);
        Ok(Place {
            queued: Rc::clone(&self.queued),
        })
    }

    /// Places that are taken.
    pub fn queued(&self) -> u32 {
        self.queued.get()
    }
}

/// A place at the door or in the queue; given back on drop.
#[derive(Debug)]
pub struct Place {
    queued: Rc<Cell<u32>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queued.set(self.queued.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_gets_exactly_the_places_there_are() {
        let gate = Gate::new(3);
        let mut places: Vec<_> = (0..20).filter_map(|_| gate.reserve().ok()).collect();
        assert_eq!((places.len(), gate.queued()), (3, 3));
        assert_eq!(gate.reserve().unwrap_err().code(), "queue_full");
        places.pop();
        assert!(gate.reserve().is_ok());
        drop(places);
        assert_eq!(gate.queued(), 0);
    }
}
