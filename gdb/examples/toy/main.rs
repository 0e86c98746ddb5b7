//! Debug a machine of five instructions:
//!
//!     cargo run -p hindsight-gdb --example toy -- tcp::1234
//!     gdb -ex 'target remote :1234'
//!
//! `toy` is the machine, which implements `DebugTarget` with all its abilities. The program counts to
//! 1000 and stores each number:
//!
//!     (gdb) watch *(long *)0x102000
//!     (gdb) continue
//!     (gdb) reverse-stepi
//!     (gdb) monitor toy

mod toy;

use std::error::Error;

use hindsight_gdb::{GdbServer, ListenAddress};

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1);
    let address: ListenAddress = address.as_deref().unwrap_or("tcp::1234").parse()?;
    let listener = address.listen(false)?;
    let bound = listener.address().unwrap_or(address);
    let machine = toy::ToyMachine::start()?;
    let server = GdbServer::start(Box::new(machine.target()), listener, |message| {
        eprint!("{message}");
    })?;
    eprintln!("toy: gdb may connect at {bound}; the machine waits for it");
    let status = machine.wait();
    server.finish(status);
    Ok(())
}
