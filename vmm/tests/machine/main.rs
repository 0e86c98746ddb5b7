//! Whole machines: control from other threads, switches of the engine, and hostile guests.

mod control;
#[cfg(test)]
mod engine_switch;
#[cfg(test)]
mod fp_error;
#[cfg(test)]
mod guest;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod random;
#[cfg(test)]
mod rsm;
