//! Compiles the fused operations against libtorch's headers, and lets every binary, test and example of this package find libtorch
//! without `LD_LIBRARY_PATH`; tells build scripts of dependants where it is.

use std::path::{Path, PathBuf};

/// Operations of a model, and what they include.
const FUSED: [&str; 18] = [
    "src/model/fused/rows.cpp",
    "src/model/fused/attention.cpp",
    "src/model/fused/slots.cpp",
    "src/model/fused/four_bits.cpp",
    "src/model/fused/libtorch.cpp",
    "src/model/fused/half.cpp",
    "src/model/fused/products.cpp",
    "src/model/fused/delta_chunks.cpp",
    "src/model/fused/delta_inputs.cpp",
    "src/model/fused/flash.cpp",
    "src/model/fused/gpu/nvrtc.cpp",
    "src/model/fused/gpu/launch.cpp",
    "src/model/fused/gpu/rows.cpp",
    "src/model/fused/gpu/experts.cpp",
    "src/model/fused/gpu/slots.cpp",
    "src/model/graph.cpp",
    "src/model/shared_memory.cpp",
    "src/model/stream.cpp",
];
const HEADERS: [&str; 7] = [
    "src/model/allocator.hpp",
    "src/model/fused/attention.hpp",
    "src/model/fused/context.hpp",
    "src/model/fused/guarded.hpp",
    "src/model/fused/vectors.hpp",
    "src/model/fused/gpu/launch.hpp",
    "src/model/fused/gpu/args.h",
];

/// What most of these files include of libtorch.
const HEADERS_READ_ONCE: [&str; 3] = ["ATen/ATen.h", "ATen/Parallel.h", "torch/csrc/autograd/custom_function.h"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Not folders, whose Rust files change nothing here.
    FUSED.iter().chain(&HEADERS).for_each(|file| println!("cargo::rerun-if-changed={file}"));
    println!("cargo::rerun-if-changed=src/ranks");
    // Absent when the crate is built without libtorch.
    let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let lib = std::fs::canonicalize(&lib).unwrap_or_else(|_| PathBuf::from(&lib));
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=LIBTORCH_LIB={}", lib.display());
    // Clippy links nothing, and its build scripts run apart from the others.
    let lints = std::env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.contains("clippy"));
    if !lints {
        compile_fused(&lib);
        compile_ranks(&lib);
    }
}

fn compile_fused(lib: &Path) {
    let include = lib.parent().map(|root| root.join("include")).unwrap_or_default();
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        // Always optimised: a debug build trains models in its tests. The flags allow sums to be vectorised and keep NaN and infinity.
        .opt_level(3)
        // The threads of libtorch, whose OpenMP library is linked already.
        .flag("-fopenmp")
        .flag("-fno-math-errno")
        .flag("-fno-trapping-math")
        .flag("-fno-signed-zeros")
        .flag("-fassociative-math")
        .warnings(false)
        .include(&include)
        .include(include.join("torch/csrc/api/include"));
    let read_once = read_headers_once(&mut build);
    build.files(FUSED).compile("rollflow_fused");
    // Some 450 MB, which are of no more use.
    read_once.map(std::fs::remove_file);
}

/// Compiles libtorch's headers once instead of once a file, which is half of the time. If that fails they are read for each.
fn read_headers_once(build: &mut cc::Build) -> Option<PathBuf> {
    let header = PathBuf::from(std::env::var_os("OUT_DIR")?).join("headers.hpp");
    std::fs::write(&header, HEADERS_READ_ONCE.map(|header| format!("#include <{header}>\n")).concat()).ok()?;
    let compiled = header.with_extension("hpp.gch");
    let done =
        build.get_compiler().to_command().args(["-x", "c++-header"]).arg(&header).arg("-o").arg(&compiled).status().ok()?;
    done.success().then(|| build.flag("-include").flag(&header))?;
    Some(compiled)
}

/// torch's collectives; `stand_ins` replaces the headers of Gloo, which libtorch does not ship.
fn compile_ranks(lib: &Path) {
    let include = lib.parent().map(|root| root.join("include")).unwrap_or_default();
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .include("src/ranks/stand_ins")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .file("src/ranks/group.cpp")
        .compile("rollflow_ranks");
}
