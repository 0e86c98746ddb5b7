//! stub

pub mod console;
