# shellcheck shell=bash
# Helpers for the scripts in ci/: messages, the cache folder, Debian packages and the lab kernel.
# Source this file; it runs nothing by itself.

repo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() {
    local status=$1
    shift
    say "$*"
    exit "$status"
}

# The statically linked program that the labs run too, and what builds it, in the checkout.
# shellcheck disable=SC2034 # for the scripts that source this
static_binary=$repo_root/target/lab/build/x86_64-unknown-linux-gnu/release/hindsight

build_static() {
    (cd "$repo_root" && RUSTFLAGS='-C target-feature=+crt-static' cargo build --quiet --release -p hindsight \
        --target x86_64-unknown-linux-gnu --target-dir target/lab/build >&2)
}

# build_static_test NAME PROGRAM: a test program of the monitor, linked so that the labs run it.
build_static_test() {
    local built
    built=$(cd "$repo_root" && RUSTFLAGS='-C target-feature=+crt-static' cargo test --release -p hindsight --test "$1" \
        --quiet --no-run --message-format json-render-diagnostics --target x86_64-unknown-linux-gnu \
        --target-dir target/lab/build |
        grep -o "\"executable\":\"[^\"]*/$1-[^\"]*\"" | tail -n 1 | cut -d '"' -f 4)
    [ -n "$built" ] || die 1 "the test program $1 does not build"
    strip -o "$2" "$built"
}

# Runs a command as root: directly, or through sudo.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        say "'$1' needs root, and sudo is not installed"
        return 1
    fi
}

# Prints the cache folder and makes it: $HINDSIGHT_CACHE, else $XDG_CACHE_HOME/hindsight, else
# .cache in the checkout (git ignores it).
cache_dir() {
    local dir
    if [ -n "${HINDSIGHT_CACHE:-}" ]; then
        dir=$HINDSIGHT_CACHE
    elif [ -n "${XDG_CACHE_HOME:-}" ]; then
        dir=$XDG_CACHE_HOME/hindsight
    else
        dir=$repo_root/.cache
    fi
    mkdir -p "$dir"
    (cd "$dir" && pwd)
}

# Runs a command while holding the cache's lock, so that two labs that start together share downloads.
with_cache_lock() {
    local cache status=0
    cache=$(cache_dir)
    exec 9>"$cache/lock"
    flock 9
    "$@" || status=$?
    exec 9>&-
    return "$status"
}

need_apt() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        die 3 "apt-get and dpkg are needed: this runs on Debian and Ubuntu"
    fi
}

package_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# True when apt knows a version of the package that it can download.
package_known() {
    local candidate
    candidate=$(apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: //p')
    [ -n "$candidate" ] && [ "$candidate" != "(none)" ]
}

# Refreshes the package lists, once per script.
apt_update() {
    [ -z "${apt_updated:-}" ] || return 0
    say "refreshing the package lists"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 || return 1
    apt_updated=1
}

# Installs what is missing of the named packages.
install_packages() {
    local package missing=()
    need_apt
    for package; do
        package_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    for package in "${missing[@]}"; do
        package_known "$package" || {
            apt_update || return 1
            break
        }
    done
    say "installing ${missing[*]}"
    apt_install "${missing[@]}" || {
        # The lists may be older than what the mirror still has.
        apt_update && apt_install "${missing[@]}"
    } || {
        say "could not install ${missing[*]}"
        return 1
    }
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l \
        apt-get -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 install "$@" >&2
}

# The packages of the first existing kernel meta package: Debian's cloud kernel, or Ubuntu's kernel for
# virtual machines, whose modules are a package of their own.
kernel_packages() {
    local meta depends
    for meta in linux-image-cloud-amd64 linux-image-virtual; do
        package_known "$meta" || continue
        depends=$(apt-cache depends --no-recommends --no-suggests "$meta" |
            sed -nE 's/^ *Depends: (linux-(image|modules)-[0-9][^ ]*)$/\1/p')
        [ -n "$depends" ] || continue
        printf '%s\n' "$depends"
        [ "$meta" = linux-image-cloud-amd64 ] ||
            sed -nE 's/^linux-image-(unsigned-)?/linux-modules-/p' <<<"$depends"
        return 0
    done
    return 1
}

# fetch_package NAME: downloads and unpacks a package to the cache, prints the folder. It is not installed.
fetch_package() {
    local name=$1 cache dir work
    cache=$(cache_dir)/packages
    dir=$cache/$name
    if [ ! -e "$dir/.complete" ]; then
        rm -rf "$dir"
        mkdir -p "$cache"
        work=$(mktemp -d "$cache/.fetch.XXXXXX")
        # As the caller: apt's own download user may not be able to write to the cache.
        say "downloading $name"
        if (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$name" >&2 ||
            { apt_update && cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$name" >&2; }) &&
            dpkg -x "$work"/*.deb "$work/root" && touch "$work/root/.complete"; then
            mv "$work/root" "$dir"
        fi
        rm -rf "$work"
    fi
    [ -e "$dir/.complete" ] || {
        say "could not download and unpack the package $name"
        return 1
    }
    printf '%s\n' "$dir"
}

# Fetches busybox, statically linked, and prints the path of the program. The package is not installed: it would
# replace the usual busybox.
fetch_busybox() {
    local root program
    need_apt
    package_known busybox-static || apt_update || return 1
    root=$(fetch_package busybox-static) || return 1
    program=$(find "$root" -path '*/bin/busybox' -type f -print -quit)
    [ -n "$program" ] || {
        say "the package busybox-static holds no busybox"
        return 1
    }
    printf '%s\n' "$program"
}

# fetch_kernel: makes the cached folder kernel/ with vmlinuz, version and the five modules, and prints it.
# $HINDSIGHT_LAB_KERNEL_REFRESH=1 looks for a newer kernel; else what is there is kept.
fetch_kernel() {
    local cache dir work packages package root module path
    cache=$(cache_dir)
    dir=$cache/kernel
    if [ -e "$dir/version" ] && [ -e "$dir/msr.ko" ] && [ -z "${HINDSIGHT_LAB_KERNEL_REFRESH:-}" ]; then
        printf '%s\n' "$dir"
        return 0
    fi
    need_apt
    packages=$(kernel_packages) || {
        apt_update || return 1
        packages=$(kernel_packages) || {
            say "apt knows neither linux-image-cloud-amd64 (Debian) nor linux-image-virtual (Ubuntu)"
            return 1
        }
    }
    work=$(mktemp -d "$cache/.kernel.XXXXXX")
    for package in $packages; do
        root=$(fetch_package "$package") || {
            rm -rf "$work"
            return 1
        }
        for path in "$root"/boot/vmlinuz-*; do
            [ ! -e "$path" ] || cp "$path" "$work/vmlinuz"
        done
        for module in irqbypass kvm kvm-amd kvm-intel msr; do
            path=$(find "$root" -name "$module.ko*" -print -quit)
            [ -z "$path" ] || unpack_module "$path" "$work/$module.ko" || return 1
        done
        rm -rf "$root"
    done
    for path in vmlinuz irqbypass.ko kvm.ko kvm-amd.ko kvm-intel.ko msr.ko; do
        # irqbypass is built into some kernels.
        [ -e "$work/$path" ] || [ "$path" = irqbypass.ko ] || {
            say "no $path in $(tr '\n' ' ' <<<"$packages")"
            rm -rf "$work"
            return 1
        }
    done
    head -n 1 <<<"$packages" | sed -E 's/^linux-image-(unsigned-)?//' >"$work/version"
    rm -rf "$dir"
    mv "$work" "$dir"
    printf '%s\n' "$dir"
}

# unpack_module FROM TO: decompresses a kernel module and drops what makes it slow to load in an emulator:
# BTF, which the kernel would parse, and the signature, which it would check.
unpack_module() {
    case $1 in
        *.xz) xz -dc "$1" >"$2" ;;
        *.zst) zstd -qdc "$1" >"$2" ;;
        *.gz) gzip -dc "$1" >"$2" ;;
        *) cp "$1" "$2" ;;
    esac || return 1
    if command -v objcopy >/dev/null; then
        objcopy --strip-debug --remove-section .BTF "$2"
    fi
}

# The place in an initramfs of an argument FILE[:GUEST].
guest_path() {
    case $1 in
        *:*) printf '%s\n' "${1#*:}" ;;
        *) printf 'files/%s\n' "$(basename "$1")" ;;
    esac
}

# add_file FROM ROOT PLACE: copies a file into the folder of an initramfs.
add_file() {
    mkdir -p "$2/$(dirname "$3")"
    cp "$1" "$2/$3"
}

# Packs a folder as an initramfs, to standard output, not compressed.
pack_initramfs() {
    (cd "$1" && find . -print0 | sort -z | cpio --null -o -H newc --quiet -R 0:0)
}
