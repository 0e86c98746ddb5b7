//! The TLBs, jump caches and run counters, which translated code reads and writes.
//!
//! A TLB and a jump cache hold what is valid for one state of the caller's address space, which the
//! caller identifies by a key. When the key changes, their contents are saved, so that a process
//! that becomes current again finds them.

#![expect(unsafe_code, reason = "the tables are in the arena of translated code")]

use crate::flag_stubs::FlagStubs;
use crate::layout::{
    CacheLineTable, Data, JUMPS, JumpEntry, LINE, LINE_SHIFT, LINES, RUN_COUNTERS, Rights,
    TLB_ENTRIES, TlbArrays, jump_index, line_index, unused_line, unused_tag,
};
use std::ptr::NonNull;

/// Number of saved TLBs, and of saved jump caches, for each kind of rights.
const SAVED: usize = 8;

/// Identifies the state of the caller's address space for which a TLB is valid.
pub type TlbKey = (u64, u64);

/// The contents of tables that are not current, by key.
#[derive(Debug)]
struct SavedTables<K, T> {
    tables: Vec<(K, T)>,
    /// Index of the contents to replace next.
    oldest: usize,
}

impl<K, T> Default for SavedTables<K, T> {
    fn default() -> Self {
        Self {
            tables: Vec::new(),
            oldest: 0,
        }
    }
}

impl<K: PartialEq, T> SavedTables<K, T> {
    /// Adds contents; if there are too many, they replace the oldest ones.
    fn save(&mut self, key: K, table: T) {
        if self.tables.len() < SAVED {
            self.tables.push((key, table));
        } else {
            self.tables[self.oldest] = (key, table);
            self.oldest = (self.oldest + 1) % SAVED;
        }
    }

    /// Removes the contents of a key and returns them.
    fn take(&mut self, key: &K) -> Option<T> {
        let found = self.tables.iter().position(|(k, _)| k == key)?;
        self.oldest = 0;
        Some(self.tables.swap_remove(found).1)
    }
}

/// A TLB for code with one kind of rights.
#[derive(Debug, Default)]
struct TlbState {
    key: TlbKey,
    /// Whether the TLB may have entries.
    used: bool,
    saved: SavedTables<TlbKey, Box<TlbArrays>>,
}

/// Identifies the states of the caller's address space for which jump cache entries are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JumpKeys {
    /// For entries of code in global pages.
    pub global: u64,
    /// For all other entries.
    pub local: u64,
}

/// A jump cache for code with one kind of rights.
#[derive(Debug, Default)]
struct JumpState {
    keys: JumpKeys,
    /// Indices of the used entries for code in global pages.
    globals: Vec<u16>,
    /// Indices of the other used entries.
    locals: Vec<u16>,
    saved: SavedTables<u64, Vec<(u16, JumpEntry)>>,
}

impl JumpState {
    /// Adds the index of an entry that was unused.
    fn add(&mut self, index: usize, global: bool) {
        let indices = if global {
            &mut self.globals
        } else {
            &mut self.locals
        };
        indices.push(u16::try_from(index).unwrap_or(0));
    }

    /// Removes the index of an entry that was used.
    fn remove(&mut self, index: usize, global: bool) {
        let indices = if global {
            &mut self.globals
        } else {
            &mut self.locals
        };
        indices.retain(|&i| usize::from(i) != index);
    }
}

/// The tables of one translator; the entries of the current ones are in its arena.
#[derive(Debug)]
pub(crate) struct Tables {
    data: NonNull<Data>,
    tlbs: [TlbState; 2],
    jumps: [JumpState; 2],
    run_counters: u32,
    /// Host address of a page that the TLBs must not contain; 0 for none.
    excluded: u64,
    /// Whether the TLBs may contain [`Tables::excluded`], because they were used meanwhile.
    excluded_lapsed: bool,
}

// SAFETY: the arena that has the data belongs to the same translator.
unsafe impl Send for Tables {}

impl Tables {
    /// Creates empty tables in an arena.
    ///
    /// # Safety
    /// `data` must be the data of an arena that exists as long as the tables, and nothing else may
    /// refer to the tables in it while code does not run.
    pub(crate) unsafe fn new(data: NonNull<Data>, flags: &FlagStubs) -> Self {
        let mut tables = Self {
            data,
            tlbs: Default::default(),
            jumps: Default::default(),
            run_counters: 0,
            excluded: 0,
            excluded_lapsed: true,
        };
        for rights in [Rights::Supervisor, Rights::User] {
            tables.clear_tlb(rights);
            for index in 0..JUMPS {
                tables.clear_jump(rights, index);
            }
        }
        tables.remove_lines();
        tables.remove_code_lines();
        // SAFETY: the contract of this function; no code runs.
        unsafe {
            (&raw mut (*data.as_ptr()).flag_kinds).write(flags.kinds);
            (&raw mut (*data.as_ptr()).flag_steps).write(flags.steps);
        }
        tables
    }

    /// Allocates a counter of block runs, sets it to 0 and returns its number.
    ///
    /// Returns `None` if all counters are in use.
    pub(crate) fn run_counter(&mut self) -> Option<u32> {
        let counter = self.run_counters;
        if counter as usize >= RUN_COUNTERS {
            return None;
        }
        self.run_counters += 1;
        Some(counter)
    }

    /// Returns the value of a run counter.
    pub(crate) fn runs(&self, counter: u32) -> u64 {
        assert!((counter as usize) < RUN_COUNTERS);
        // SAFETY: within the array; no code runs.
        unsafe { (&raw const (*self.data.as_ptr()).runs[counter as usize]).read() }
    }

    /// Returns the value of a run counter, and resets it to 0.
    pub(crate) fn take_runs(&self, counter: u32) -> u64 {
        let runs = self.runs(counter);
        // SAFETY: within the array, as `runs` has checked; no code runs, and nothing refers to it.
        unsafe { (&raw mut (*self.data.as_ptr()).runs[counter as usize]).write(0) };
        runs
    }

    /// Empties the jump caches, and frees all run counters.
    pub(crate) fn reset(&mut self) {
        for rights in [Rights::Supervisor, Rights::User] {
            self.clear_jumps(rights);
        }
        for counter in 0..self.run_counters {
            self.take_runs(counter);
        }
        self.run_counters = 0;
    }

    fn jump(&self, rights: Rights, index: usize) -> JumpEntry {
        // SAFETY: within the array, as `jump_index` and the loops over it guarantee; no code runs.
        unsafe { (&raw const (*self.data.as_ptr()).jumps[rights as usize][index]).read() }
    }

    fn set_jump(&mut self, rights: Rights, index: usize, jump: JumpEntry) {
        // SAFETY: as in `jump`.
        unsafe { (&raw mut (*self.data.as_ptr()).jumps[rights as usize][index]).write(jump) };
    }

    fn clear_jump(&mut self, rights: Rights, index: usize) {
        let unused = JumpEntry {
            // No RIP with this tag maps to this index.
            tag: index as u64 ^ 1,
            entry: 0,
            charge: 0,
            global: 0,
        };
        self.set_jump(rights, index, unused);
    }

    fn clear_locals(&mut self, rights: Rights) {
        for index in std::mem::take(&mut self.jumps[rights as usize].locals) {
            self.clear_jump(rights, index.into());
        }
    }

    /// Empties the jump cache, with what is saved of it.
    fn clear_jumps(&mut self, rights: Rights) {
        self.clear_locals(rights);
        for index in std::mem::take(&mut self.jumps[rights as usize].globals) {
            self.clear_jump(rights, index.into());
        }
        self.jumps[rights as usize].saved = SavedTables::default();
    }

    /// Whether the jump cache has the code of a unit at `rip`.
    pub(crate) fn has_jump(&self, rights: Rights, rip: u64, entry: u64) -> bool {
        self.jump(rights, jump_index(rip)).entry == entry
    }

    /// Enters an entry into the jump cache.
    pub(crate) fn add_jump(&mut self, rights: Rights, jump: JumpEntry) {
        self.put_jump(rights, jump_index(jump.tag), jump);
    }

    fn put_jump(&mut self, rights: Rights, index: usize, jump: JumpEntry) {
        let old = self.jump(rights, index);
        let state = &mut self.jumps[rights as usize];
        if old.entry != 0 && old.global != jump.global {
            state.remove(index, old.global != 0);
        }
        if old.entry == 0 || old.global != jump.global {
            state.add(index, jump.global != 0);
        }
        self.set_jump(rights, index, jump);
    }

    /// Removes the code of a unit at `rip` from the jump caches.
    pub(crate) fn remove_jump(&mut self, rights: Rights, rip: u64, entry: u64) {
        self.remove_jumps(rights, |jump| jump.entry == entry, &[jump_index(rip)]);
    }

    /// Removes the entries that match from a current jump cache, at some indices, and from all
    /// saved ones.
    fn remove_jumps(
        &mut self,
        rights: Rights,
        matches: impl Fn(&JumpEntry) -> bool,
        indices: &[usize],
    ) {
        for &index in indices {
            let old = self.jump(rights, index);
            if old.entry != 0 && matches(&old) {
                self.clear_jump(rights, index);
                self.jumps[rights as usize].remove(index, old.global != 0);
            }
        }
        for (_, entries) in &mut self.jumps[rights as usize].saved.tables {
            entries.retain(|(_, jump)| !matches(jump));
        }
    }

    /// Makes the jump cache valid for new keys.
    ///
    /// Its contents are those that it had when the keys were current before. The entries of the
    /// current local key are saved if that can become current again (`saves`).
    pub(crate) fn select_jumps(&mut self, rights: Rights, keys: JumpKeys, saves: bool) {
        let state = &mut self.jumps[rights as usize];
        let old = std::mem::replace(&mut state.keys, keys);
        if old.global != keys.global {
            self.clear_jumps(rights);
            return;
        }
        if old == keys {
            return;
        }
        if saves && !state.locals.is_empty() {
            let locals = state.locals.clone();
            let entry = |index: u16| (index, self.jump(rights, index.into()));
            let entries = locals.into_iter().map(entry).collect();
            self.jumps[rights as usize].saved.save(old.local, entries);
        }
        self.clear_locals(rights);
        if let Some(entries) = self.jumps[rights as usize].saved.take(&keys.local) {
            for (index, jump) in entries {
                self.put_jump(rights, index.into(), jump);
            }
        }
    }

    fn tlb(&mut self, rights: Rights) -> &mut TlbArrays {
        // SAFETY: the arrays are within the data, and no code runs.
        unsafe { &mut (*self.data.as_ptr()).tlb[rights as usize] }
    }

    fn clear_tlb(&mut self, rights: Rights) {
        let tlb = self.tlb(rights);
        tlb.read_tag = std::array::from_fn(unused_tag);
        tlb.write_tag = std::array::from_fn(unused_tag);
    }

    /// Makes the TLB valid for a key; see [`Tables::select_jumps`].
    pub(crate) fn select_tlb(&mut self, rights: Rights, key: TlbKey, saves: bool) {
        let state = &mut self.tlbs[rights as usize];
        let old = std::mem::replace(&mut state.key, key);
        if old == key {
            return;
        }
        let used = std::mem::take(&mut state.used);
        let found = state.saved.take(&key);
        if used && saves {
            let arrays = Box::new(self.tlb(rights).clone());
            self.tlbs[rights as usize].saved.save(old, arrays);
        }
        if let Some(arrays) = found {
            self.tlb(rights).clone_from(&arrays);
            self.tlbs[rights as usize].used = true;
        } else if used {
            self.clear_tlb(rights);
        }
    }

    fn lines(&mut self, rights: Rights) -> &mut CacheLineTable {
        // SAFETY: the tables are within the data, and code does not use them while this runs.
        unsafe { &mut (*self.data.as_ptr()).lines[rights as usize] }
    }

    /// Enters a line: see [`crate::Translator::enter_line`].
    pub(crate) fn enter_line(&mut self, rights: Rights, linear: u64, host: u64, write: bool) {
        let (index, tag) = (line_index(linear >> LINE_SHIFT), linear & !(LINE - 1));
        let keeps = self.lines(rights).read_tag[index] == tag;
        let dirty = keeps && self.lines(rights).write_tag[index] == tag;
        self.remove_line(linear);
        let lines = self.lines(rights);
        (lines.read_tag[index], lines.read_host[index]) = (tag, host);
        if write || dirty {
            (lines.write_tag[index], lines.write_host[index]) = (tag, host);
        }
    }

    /// Removes the lines of the set of an address.
    pub(crate) fn remove_line(&mut self, address: u64) {
        let index = line_index(address >> LINE_SHIFT);
        for rights in [Rights::Supervisor, Rights::User] {
            let lines = self.lines(rights);
            lines.read_tag[index] = unused_line(index);
            lines.write_tag[index] = unused_line(index);
        }
    }

    /// Removes all lines of memory.
    pub(crate) fn remove_lines(&mut self) {
        for index in 0..LINES {
            self.remove_line((index as u64) << LINE_SHIFT);
        }
    }

    /// Enters a line of code.
    pub(crate) fn set_code_line(&mut self, line: u64) {
        let index = line_index(line);
        // SAFETY: within the array; no code runs.
        unsafe { (&raw mut (*self.data.as_ptr()).code_lines[index]).write(line) };
    }

    /// Removes all lines of code.
    pub(crate) fn remove_code_lines(&mut self) {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.data.as_ptr()).code_lines).write([u64::MAX; LINES]) };
    }

    /// Excludes a page, given by its host address, from the TLBs; 0 allows all pages.
    pub(crate) fn exclude_page(&mut self, host: u64) {
        if host == 0 {
            self.excluded_lapsed = true;
        } else if host != self.excluded || self.excluded_lapsed {
            self.excluded = host;
            self.excluded_lapsed = false;
            self.remove_lines();
            for rights in [Rights::Supervisor, Rights::User] {
                self.clear_tlb(rights);
                self.tlbs[rights as usize].saved = SavedTables::default();
            }
        }
    }

    /// Whether a page is excluded from the TLBs.
    pub(crate) fn is_excluded(&self, host: u64) -> bool {
        host == self.excluded && !self.excluded_lapsed
    }

    /// Enters a page into the TLB for accesses with these rights.
    ///
    /// Code may run, which is left or continues after the access.
    pub(crate) fn enter_page(&mut self, rights: Rights, linear: u64, host: u64, write: bool) {
        debug_assert!(host & 0xfff == 0);
        let index = tlb_index(linear);
        self.tlbs[rights as usize].used = true;
        let tlb = self.data.as_ptr();
        // SAFETY: the arrays are within the data; code reads them one instruction after the other.
        unsafe {
            let tlb = &raw mut (*tlb).tlb[rights as usize];
            let (tag, to) = if write {
                (
                    &raw mut (*tlb).write_tag[index],
                    &raw mut (*tlb).write_host[index],
                )
            } else {
                (
                    &raw mut (*tlb).read_tag[index],
                    &raw mut (*tlb).read_host[index],
                )
            };
            tag.write(linear & !0xfff);
            to.write(host);
        }
    }

    /// Evicts the page that contains `linear` from all tables, saved ones included.
    ///
    /// If the page may be larger than 4 KiB (`large`), all tables are emptied.
    pub(crate) fn evict(&mut self, linear: u64, large: bool) {
        self.remove_lines();
        for rights in [Rights::Supervisor, Rights::User] {
            if large {
                self.clear_tlb(rights);
                self.tlbs[rights as usize].saved = SavedTables::default();
                self.clear_jumps(rights);
                continue;
            }
            let index = tlb_index(linear);
            let saved = &mut self.tlbs[rights as usize].saved.tables;
            for arrays in saved.iter_mut().map(|(_, arrays)| arrays) {
                arrays.evict(index);
            }
            self.tlb(rights).evict(index);
            let page = linear >> 12;
            // A block may reach into the next page.
            let matches = |jump: &JumpEntry| page.wrapping_sub(jump.tag >> 12) <= 1;
            let state = &self.jumps[rights as usize];
            let used = state.globals.iter().chain(&state.locals);
            let indices: Vec<usize> = used.map(|&index| index.into()).collect();
            self.remove_jumps(rights, matches, &indices);
        }
    }
}

impl TlbArrays {
    fn evict(&mut self, index: usize) {
        self.read_tag[index] = unused_tag(index);
        self.write_tag[index] = unused_tag(index);
    }
}

/// Returns the TLB index of a linear address.
fn tlb_index(linear: u64) -> usize {
    (linear >> 12 & (TLB_ENTRIES as u64 - 1)) as usize
}
