/*
 * A plugin for QEMU: counts the instructions and the taken branches of a guest, as this project counts them.
 *
 * Counting begins at the first instruction at the address `start=` and ends with QEMU. A repeated string
 * instruction counts as one, although QEMU reports it once for each iteration. A branch is taken where an instruction does
 * not follow the one before it in memory; so interrupts and exceptions count too. With `branches=FILE` each is
 * written there: from and to, in hexadecimal, one a line.
 *
 * QEMU's header is not packaged, so the functions of version 1 of its interface that are used are declared here.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_info;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { NO_REGISTERS = 0 };
typedef void (*tb_callback)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
typedef void (*insn_callback)(unsigned int vcpu, void *data);
typedef void (*exit_callback)(qemu_plugin_id_t id, void *data);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, tb_callback callback);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, insn_callback callback, int flags,
                                            void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, exit_callback callback, void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

/* One translated instruction. They are few, and are never freed. */
struct insn {
    uint64_t at;
    uint64_t next;
    bool repeats;
};

static uint64_t start;
static bool counting;
static const struct insn *last;
static uint64_t instructions, branches, iterations;
static FILE *stream;

/* A string instruction with a repeat prefix. */
static bool repeats(const uint8_t *code, size_t len)
{
    bool prefix = false;
    for (size_t i = 0; i < len; i++) {
        uint8_t byte = code[i];
        if (byte == 0xf2 || byte == 0xf3)
            prefix = true;
        else if ((byte >= 0x6c && byte <= 0x6f) || (byte >= 0xa4 && byte <= 0xa7) || (byte >= 0xaa && byte <= 0xaf))
            return prefix;
        else if (byte != 0x66 && byte != 0x67 && (byte & 0xf0) != 0x40 && byte != 0x26 && byte != 0x2e &&
                 byte != 0x36 && byte != 0x3e && byte != 0x64 && byte != 0x65)
            return false;
    }
    return false;
}

static void executed(unsigned int vcpu, void *data)
{
    const struct insn *now = data;
    (void)vcpu;
    if (!counting) {
        if (now->at != start)
            return;
        counting = true;
    }
    if (last && last->at == now->at && now->repeats) {
        iterations++;
        return;
    }
    instructions++;
    if (last && last->next != now->at) {
        branches++;
        if (stream)
            fprintf(stream, "%" PRIx64 " %" PRIx64 "\n", last->at, now->at);
    }
    last = now;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
        struct qemu_plugin_insn *from = qemu_plugin_tb_get_insn(tb, i);
        struct insn *insn = malloc(sizeof(*insn));
        if (!insn)
            abort();
        insn->at = qemu_plugin_insn_vaddr(from);
        insn->next = insn->at + qemu_plugin_insn_size(from);
        insn->repeats = repeats(qemu_plugin_insn_data(from), qemu_plugin_insn_size(from));
        qemu_plugin_register_vcpu_insn_exec_cb(from, executed, NO_REGISTERS, insn);
    }
}

static void ended(qemu_plugin_id_t id, void *data)
{
    (void)id;
    (void)data;
    fprintf(stderr, "counts: instructions %" PRIu64 " branches %" PRIu64 " iterations %" PRIu64 "\n", instructions,
            branches, iterations);
    if (stream)
        fclose(stream);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info,
                                                               int argc, char **argv)
{
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "start=", 6)) {
            start = strtoull(argv[i] + 6, NULL, 0);
        } else if (!strncmp(argv[i], "branches=", 9)) {
            stream = fopen(argv[i] + 9, "w");
            if (!stream)
                return 1;
        } else {
            return 1;
        }
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
