/*
 * A plugin for QEMU TCG (plugin API version 1) that writes every taken branch between two addresses to a
 * file: 16 bytes each, where it is and where it goes, little endian.
 *
 *   -plugin taken_branches.so,first=HEX,last=HEX,out=FILE
 *
 * Recording begins with the branch at `first` and ends with the branch that arrives at `last`. The
 * plugin finds branch instructions by their opcodes; a branch is taken when the next instruction does not follow
 * it in memory. A
 * change of flow by any other instruction, that is an exception or interrupt, is an error: the programs
 * that are judged have none.
 *
 * QEMU's header is in no package, so the functions that are used are declared below.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
typedef void (*vcpu_udata_cb)(unsigned int vcpu, void *data);
typedef void (*udata_cb)(qemu_plugin_id_t id, void *data);
typedef void (*tb_trans_cb)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, vcpu_udata_cb cb,
                                            enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, tb_trans_cb cb);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, udata_cb cb, void *data);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum kind { PLAIN, REPEATED, CONDITIONAL, ALWAYS };

/* The data of an instruction's callback. It is never freed, because QEMU may call it until the end. */
struct insn {
    uint64_t address;
    uint64_t next;
    enum kind kind;
};

static uint64_t first, last;
static FILE *out;
static struct insn before;
static bool have_before, recording, done;
static uint64_t records, odd;

static bool is_prefix(uint8_t byte)
{
    return byte == 0xf0 || byte == 0xf2 || byte == 0xf3 || byte == 0x2e || byte == 0x36 || byte == 0x3e ||
           byte == 0x26 || byte == 0x64 || byte == 0x65 || byte == 0x66 || byte == 0x67 ||
           (byte & 0xf0) == 0x40; /* REX in 64-bit mode, the only one judged */
}

/* SDM Vol. 2, "Opcode Map": the control transfers of 64-bit mode. */
static enum kind kind_of(const uint8_t *bytes, size_t size)
{
    bool repeat = false;
    size_t at = 0;
    while (at < size && is_prefix(bytes[at])) {
        repeat |= bytes[at] == 0xf2 || bytes[at] == 0xf3;
        at++;
    }
    if (at >= size)
        return PLAIN;
    uint8_t op = bytes[at], second = at + 1 < size ? bytes[at + 1] : 0;
    if ((op & 0xf0) == 0x70 || (op >= 0xe0 && op <= 0xe3) || (op == 0x0f && (second & 0xf0) == 0x80))
        return CONDITIONAL;
    if (op == 0xe8 || op == 0xe9 || op == 0xeb || op == 0xc2 || op == 0xc3 || op == 0xca || op == 0xcb ||
        op == 0xcf || op == 0xcc || op == 0xcd || op == 0xf1)
        return ALWAYS;
    if (op == 0xff && (second >> 3 & 7) >= 2 && (second >> 3 & 7) <= 5)
        return ALWAYS;
    if (op == 0x0f && (second == 0x05 || second == 0x07 || second == 0x34 || second == 0x35))
        return ALWAYS;
    bool string = (op >= 0xa4 && op <= 0xa7) || (op >= 0xaa && op <= 0xaf) || (op >= 0x6c && op <= 0x6f);
    return repeat && string ? REPEATED : PLAIN;
}

static void write_record(uint64_t from, uint64_t to)
{
    uint64_t record[2] = { from, to };
    if (fwrite(record, sizeof record, 1, out) != 1)
        abort();
    records++;
}

/* Before an instruction: how the one before it ended is now known. */
static void on_insn(unsigned int vcpu, void *data)
{
    const struct insn *now = data;
    (void)vcpu;
    if (done)
        return;
    if (have_before && !recording && before.address == first)
        recording = true;
    if (have_before && recording) {
        bool follows = now->address == before.next;
        if (before.kind == ALWAYS || (before.kind == CONDITIONAL && !follows))
            write_record(before.address, now->address);
        else if (!follows && !(before.kind == REPEATED && now->address == before.address))
            odd++;
        done = now->address == last;
    }
    before = *now;
    have_before = true;
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    for (size_t n = 0; n < qemu_plugin_tb_n_insns(tb); n++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, n);
        struct insn *entry = malloc(sizeof *entry);
        if (!entry)
            abort();
        entry->address = qemu_plugin_insn_vaddr(insn);
        entry->next = entry->address + qemu_plugin_insn_size(insn);
        entry->kind = kind_of(qemu_plugin_insn_data(insn), qemu_plugin_insn_size(insn));
        qemu_plugin_register_vcpu_insn_exec_cb(insn, on_insn, QEMU_PLUGIN_CB_NO_REGS, entry);
    }
}

static void on_end(qemu_plugin_id_t id, void *data)
{
    (void)id;
    (void)data;
    fprintf(stderr, "taken_branches: records=%llu odd=%llu done=%d\n", (unsigned long long)records,
            (unsigned long long)odd, done);
    fclose(out);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
                                                               char **argv)
{
    (void)info;
    for (int n = 0; n < argc; n++) {
        if (!strncmp(argv[n], "first=", 6))
            first = strtoull(argv[n] + 6, NULL, 16);
        else if (!strncmp(argv[n], "last=", 5))
            last = strtoull(argv[n] + 5, NULL, 16);
        else if (!strncmp(argv[n], "out=", 4))
            out = fopen(argv[n] + 4, "wb");
    }
    if (!first || !last || !out) {
        fprintf(stderr, "taken_branches: first=, last= and out= are needed\n");
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, on_end, NULL);
    return 0;
}
