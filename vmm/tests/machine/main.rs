//! Whole machines: control from other threads, and guests that do their worst.

#[cfg(test)]
mod control;
#[cfg(test)]
mod guest;
#[cfg(test)]
mod hostile;
