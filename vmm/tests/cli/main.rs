//! The `hindsight` command as a user meets it.

mod bad_input;
mod config;
mod consoles;
mod diagnosis;
mod display;
mod ends;
mod keyboard;
mod logging;
mod manners;
mod outputs;
mod rig;
mod sandbox;
mod vsock;
