# cpuchat for Nix, on Linux and macOS: nix run "github:OWNER/cpuchat?dir=packaging"
#
# The engine is the sdist of llama-cpp-python that pyproject.toml pins, built with a module for each instruction set,
# since the result of a build may be used on another CPU. Libraries are those of nixpkgs, whatever their version.
#
# Parsed with nix-instantiate; not evaluated or built yet where this was written, and so without a flake.lock.
{
  description = "A terminal chat app for local language models on CPUs that shows how fast they could run";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs =
    { self, nixpkgs }:
    let
      systems = [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ];

      engine =
        pkgs:
        pkgs.python3Packages.buildPythonPackage rec {
          pname = "llama-cpp-python";
          version = "0.3.36";
          pyproject = true;
          src = pkgs.fetchPypi {
            pname = "llama_cpp_python";
            inherit version;
            hash = "sha256-gy2waZAH8b6Vp+Qe8S6IkmsCuoNkYeNqNjctsnYMGi4=";
          };
          dontUseCmakeConfigure = true;
          nativeBuildInputs = [
            pkgs.cmake
            pkgs.ninja
          ];
          build-system = with pkgs.python3Packages; [
            pathspec
            pyproject-metadata
            scikit-build-core
          ];
          dependencies = with pkgs.python3Packages; [
            diskcache
            jinja2
            numpy
            typing-extensions
          ];
          # llama.cpp alone: the project around it compiles what a chat does not use, and does not install the modules.
          env.SKBUILD_CMAKE_SOURCE_DIR = "vendor/llama.cpp";
          env.SKBUILD_CMAKE_ARGS = pkgs.lib.concatStringsSep ";" [
            "-DGGML_BACKEND_DL=ON"
            "-DGGML_CPU_ALL_VARIANTS=ON"
            "-DGGML_NATIVE=OFF"
            "-DGGML_OPENMP=OFF"
            "-DGGML_METAL=OFF"
            "-DGGML_BLAS=OFF"
            "-DLLAMA_OPENSSL=OFF"
            "-DLLAMA_BUILD_COMMON=OFF"
            "-DLLAMA_BUILD_TOOLS=OFF"
            "-DLLAMA_BUILD_SERVER=OFF"
            "-DLLAMA_BUILD_APP=OFF"
            "-DLLAMA_BUILD_TESTS=OFF"
            "-DLLAMA_BUILD_EXAMPLES=OFF"
            "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib"
            "-DCMAKE_INSTALL_LIBDIR=llama_cpp/lib"
            "-DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include"
            "-DCMAKE_INSTALL_RPATH=${if pkgs.stdenv.hostPlatform.isDarwin then "@loader_path" else "$ORIGIN"}"
            "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON" # a wheel has no links
          ];
          preBuild = ''
            export CMAKE_BUILD_PARALLEL_LEVEL="$NIX_BUILD_CORES"
          '';
          pythonImportsCheck = [ "llama_cpp" ];
        };

      app =
        pkgs:
        pkgs.python3Packages.buildPythonApplication {
          pname = "cpuchat";
          version = "0.1.0";
          pyproject = true;
          src = pkgs.lib.cleanSource ../.;
          build-system = [ pkgs.python3Packages.hatchling ];
          pythonRelaxDeps = true;
          dependencies =
            [ (engine pkgs) ]
            ++ (with pkgs.python3Packages; [
              click
              httpx
              huggingface-hub
              jinja2
              linkify-it-py
              llguidance
              markdown-it-py
              mdit-py-plugins
              msgspec
              numpy
              platformdirs
              psutil
              pygments
              rich
              starlette
              textual
              tomlkit
              uvicorn
            ]);
          installCheckPhase = ''
            HOME=$(mktemp -d) $out/bin/cpuchat ask --max-tokens 16 "What is a KV cache?"
          '';
          doInstallCheck = true;
          meta = {
            description = "Terminal chat for local language models on CPUs";
            license = pkgs.lib.licenses.mit;
            mainProgram = "cpuchat";
          };
        };
    in
    {
      packages = nixpkgs.lib.genAttrs systems (system: {
        default = app nixpkgs.legacyPackages.${system};
      });
    };
}
