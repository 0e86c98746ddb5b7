//! `hindsight doctor`: what this host's KVM really does, measured with tiny guests.
