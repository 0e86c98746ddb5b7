//! The symbols of a kernel module that is being loaded, from its `struct module` in guest memory.

use super::processes::{LinuxKernel, read_pointer, read_u32, read_u64};
use crate::memory::LinearMemory;

/// Maximum number of symbols of a module.
const SYMBOLS_MAX: u64 = 200_000;
/// Bytes of a symbol, `Elf64_Sym`, and the type of functions in it.
const SYMBOL_LEN: usize = 24;
const FUNCTION: u8 = 2;
/// Bytes of a module's name, and of a symbol's name at most.
const NAME_MAX: usize = 56;
const SYMBOL_NAME_MAX: usize = 256;
/// The largest code of a module in bytes: the size of the kernel's part for modules.
const CODE_MAX: u64 = 1 << 30;

/// A function of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFunction {
    /// Linear address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// The function's name.
    pub name: String,
}

/// A module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedModule {
    /// The module's name.
    pub name: String,
    /// Linear address of its code.
    pub start: u64,
    /// Bytes of its code.
    pub len: u64,
    /// The functions in its code.
    pub functions: Vec<ModuleFunction>,
}

/// Reads a name that ends with a zero; `None` if it is empty or longer than `max` bytes with the zero.
fn read_name(linear: &LinearMemory<'_>, at: u64, max: usize) -> Option<String> {
    let bytes = linear.read(at, max);
    let len = bytes.iter().position(|&byte| byte == 0)?;
    (len != 0).then_some(())?;
    Some(String::from_utf8_lossy(&bytes[..len]).into_owned())
}

impl LinuxKernel {
    /// The module whose `struct module` is at `at`, before the kernel calls its first function.
    pub fn module(&self, linear: &LinearMemory<'_>, at: u64) -> Option<LoadedModule> {
        let layout = self.layout().module.as_ref()?;
        let field = |offset: u64| at.wrapping_add(offset);
        let start = read_pointer(linear, field(layout.code))?;
        let len = u64::from(read_u32(linear, field(layout.code_size))?);
        let symbols = read_pointer(linear, field(layout.symbols))?;
        let table = read_pointer(linear, symbols.wrapping_add(layout.symbol_table))?;
        let names = read_pointer(linear, symbols.wrapping_add(layout.names))?;
        let count = read_u64(linear, symbols.wrapping_add(layout.symbol_count))? & 0xffff_ffff;
        if len == 0 || len > CODE_MAX || count > SYMBOLS_MAX {
            return None;
        }
        // The code does not wrap around the end of the addresses, so no function precedes it.
        start.checked_add(len)?;
        let size = SYMBOL_LEN.checked_mul(usize::try_from(count).ok()?)?;
        let bytes = linear.read(table, size);
        let functions = bytes.chunks_exact(SYMBOL_LEN).filter_map(|symbol| {
            let (head, numbers) = symbol.split_first_chunk::<8>()?;
            let (address, size) = numbers.split_first_chunk::<8>()?;
            let address = u64::from_le_bytes(*address);
            let is_own = address.wrapping_sub(start) < len && head[4] & 0xf == FUNCTION;
            let offset = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            let name_at = names.wrapping_add(offset.into());
            is_own.then_some(())?;
            Some(ModuleFunction {
                address,
                size: u64::from_le_bytes(*size.first_chunk()?),
                name: read_name(linear, name_at, SYMBOL_NAME_MAX)?,
            })
        });
        Some(LoadedModule {
            name: read_name(linear, field(layout.name), NAME_MAX)?,
            start,
            len,
            functions: functions.collect(),
        })
    }
}
