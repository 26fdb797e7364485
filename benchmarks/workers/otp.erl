%% A supervisor of OTP over programs of the operating system, as few lines as it takes.
%%
%% Arguments of main/1: a file of terms for file:consult/1: {sup, Flags}, and for each child
%% {child, Name, Restart, Significant, WaitsForReady, StopMs, Argv} or {nested, Flags, [Child]}.
%% A child is a gen_server that owns a port.  Its init/1 returns when the program runs, or has
%% written "ready"; its terminate/2 sends SIGTERM, and SIGKILL after StopMs.
%% Standard input has commands: "add TERM", "remove NAME", "pid NAME".
-module(otp).
-export([main/1, init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2, program/1,
         group/2, handle_event/2]).

main([File]) ->
    process_flag(trap_exit, true),
    Main = self(),
    ok = gen_event:add_handler(erl_signal_server, ?MODULE, {events, Main}),
    gen_event:delete_handler(erl_signal_server, erl_signal_handler, []),
    os:set_signal(sigterm, handle),
    os:set_signal(sighup, handle),
    {ok, [{sup, Flags} | Children]} = file:consult(File),
    case group(Flags, Children) of
        {ok, Sup} -> spawn(fun() -> commands(Sup) end), wait(Sup);
        {error, Reason} -> io:format(standard_error, "~0p~n", [Reason]), halt(1)
    end.

wait(Sup) ->
    receive
        {signal, sigterm} -> exit(Sup, shutdown), receive {'EXIT', Sup, _} -> halt(0) end;
        {'EXIT', Sup, _} -> halt(1);
        _ -> wait(Sup)
    end.

commands(Sup) ->
    case io:get_line("") of
        eof -> ok;
        "add " ++ Text ->
            {ok, Tokens, _} = erl_scan:string(Text),
            {ok, Child} = erl_parse:parse_term(Tokens),
            supervisor:start_child(Sup, spec(Child)), commands(Sup);
        "remove " ++ Text ->
            supervisor:terminate_child(Sup, string:trim(Text)), commands(Sup);
        "pid " ++ Text ->
            Name = string:trim(Text),
            [io:format("pid ~s ~p~n", [Name, gen_server:call(P, pid)])
             || {N, P, _, _} <- supervisor:which_children(Sup), N =:= Name],
            commands(Sup)
    end.

group(Flags, Children) -> supervisor:start_link(?MODULE, {group, Flags, Children}).
program(Child) -> gen_server:start_link(?MODULE, Child, []).

spec({nested, Flags, Children}) ->
    #{id => nested, start => {?MODULE, group, [Flags, Children]}, type => supervisor};
spec({child, Name, Restart, Significant, _, Stop, _} = Child) ->
    #{id => Name, start => {?MODULE, program, [Child]}, restart => Restart,
      significant => Significant, shutdown => Stop + 1000}.

init({events, Main}) -> {ok, Main};
init({group, Flags, Children}) -> {ok, {Flags, lists:map(fun spec/1, Children)}};
init({child, _, _, _, Waits, Stop, [Program | Args]}) ->
    process_flag(trap_exit, true),
    Port = open_port({spawn_executable, Program}, [{args, Args}, exit_status, {line, 1000}]),
    {os_pid, Pid} = erlang:port_info(Port, os_pid),
    case Waits of
        true -> receive {Port, {data, {eol, "ready"}}} -> ok;
                        {Port, {exit_status, _}} -> exit(failed) end;
        false -> ok
    end,
    {ok, {Port, Pid, Stop}}.

handle_event(Signal, Main) -> Main ! {signal, Signal}, {ok, Main}.
handle_call(pid, _, {_, Pid, _} = State) -> {reply, Pid, State}.
handle_cast(_, State) -> {noreply, State}.
handle_info({Port, {data, {_, Line}}}, {Port, _, _} = State) ->
    io:format("~s~n", [Line]), {noreply, State};
handle_info({Port, {exit_status, 0}}, {Port, _, _}) -> {stop, normal, ended};
handle_info({Port, {exit_status, Code}}, {Port, _, _}) -> {stop, {exit_status, Code}, ended};
handle_info(_, State) -> {noreply, State}.

terminate(_, {Port, Pid, Stop}) ->
    os:cmd("kill -TERM " ++ integer_to_list(Pid)),
    receive {Port, {exit_status, _}} -> ok
    after Stop -> os:cmd("kill -KILL " ++ integer_to_list(Pid)) end;
terminate(_, _) -> ok.
