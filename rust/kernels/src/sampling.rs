//! Everything after the logits: see the files of this folder.
