//! Port input and output.

use super::Done;
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::registers::Reg;
use hindsight_regs::cr::Cr0;

impl Core {
    /// Checks IOPL and the I/O permission bitmap.
    pub(crate) fn check_port(&mut self, port: u16, size: u8) -> Done {
        let allowed = !self.regs.v86() && self.mode.cpl() <= self.regs.iopl();
        if !self.cr0(Cr0::PE) || allowed {
            return Ok(());
        }
        let tr = self.state.tr;
        let limit = u64::from(tr.limit);
        // Only a 32-bit or 64-bit TSS has an I/O permission bitmap.
        if tr.access & 0xd != 9 || limit < 0x67 {
            return Err(Fault::GP);
        }
        let base: u16 = self.read_sys(self.wrap(tr.base.wrapping_add(0x66)))?;
        let at = u64::from(base) + u64::from(port) / 8;
        if at + 1 > limit {
            return Err(Fault::GP);
        }
        let bits: u16 = self.read_sys(self.wrap(tr.base.wrapping_add(at)))?;
        let mask = ((1_u16 << size) - 1) << (port % 8);
        if bits & mask == 0 {
            Ok(())
        } else {
            Err(Fault::GP)
        }
    }

    pub(crate) fn port_in(&mut self, port: u16, size: u8) -> u64 {
        let mut data = [0; 8];
        self.platform()
            .port_read(port, &mut data[..usize::from(size & 7)]);
        self.check_port_breakpoints(port, size.into());
        self.debug.stops.record_port(port, size, false);
        self.exit.requested = true;
        u64::from_le_bytes(data)
    }

    pub(crate) fn port_out(&mut self, port: u16, size: u8, v: u64) {
        let data = v.to_le_bytes();
        self.platform()
            .port_write(port, &data[..usize::from(size & 7)]);
        self.check_port_breakpoints(port, size.into());
        self.debug.stops.record_port(port, size, true);
        self.exit.requested = true;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "port numbers have 16 bits")]
fn port(c: &Core, o: &Op) -> u16 {
    if o.src == Reg::Zero {
        o.imm as u16 & 0xff
    } else {
        c.regs.read(Reg::Rdx)
    }
}

/// IN; the port is an immediate or DX (`o.s`).
pub(crate) fn input(c: &mut Core, o: &Op) -> Done {
    let port = port(c, o);
    c.check_port(port, o.size)?;
    let v = c.port_in(port, o.size);
    c.regs.write_sized(Reg::Rax, o.size, v);
    Ok(())
}

/// OUT.
pub(crate) fn output(c: &mut Core, o: &Op) -> Done {
    let port = port(c, o);
    c.check_port(port, o.size)?;
    let v = c.regs.read_sized(Reg::Rax, o.size);
    c.port_out(port, o.size, v);
    Ok(())
}
