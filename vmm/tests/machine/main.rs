//! Whole machines: control from other threads, and guests that do their worst.

#[cfg(test)]
mod changes;
mod control;
#[cfg(test)]
mod guest;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod smm;
